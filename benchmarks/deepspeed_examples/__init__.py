"""DeepSpeed's published training examples, unmodified, under DeepSpeed and under megazero, and what differs."""
