"""Memory, traffic and time of each ZeRO stage on this machine, compared with the plan, like `megazero memory-report`.

python examples/zero_memory_report.py
python examples/zero_memory_report.py --stages 1,3 --precision bf16 model.num_layers=12
torchrun --nproc_per_node 4 examples/zero_memory_report.py
"""

import typer

from megazero.plan.commands import memory_report

if __name__ == "__main__":
    typer.run(memory_report)
