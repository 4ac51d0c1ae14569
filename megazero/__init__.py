"""megazero: GPT pretraining in which every parallel dimension and every ZeRO stage compose."""
