"""The commands `megazero models` and `megazero config`: the values and the keys of run files."""

import json
from typing import Annotated

import typer
from rich.table import Column, Table

from megazero.cli._common import fail, print_table
from megazero.training.signals import EXIT_REFUSED


def models() -> None:
    """List the published models that model.preset can name."""
    from megazero.models.config import ModelConfig
    from megazero.models.registry import PARAMETERS

    right = (Column(name, justify="right") for name in ("parameters", "layers", "hidden", "heads", "vocab", "context"))
    table = Table("model.preset", "family", *right, box=None)
    for name, parameters in PARAMETERS.items():
        model = ModelConfig(preset=name)
        sizes = parameters, model.num_layers, model.hidden_size, model.num_heads, model.vocab_size, model.seq_len
        table.add_row(name, model.family, *(f"{size:,}" for size in sizes))
    print_table(table)


def config(
    name: Annotated[str, typer.Argument(help="A section or key, such as zero or training.steps; all by default.")] = "",
    schema: Annotated[bool, typer.Option("--schema", help="The JSON schema, for editors (docs/config.md).")] = False,
) -> None:
    """Print every key of a run file with its description, type and default.  The output is itself a run file."""
    from megazero.config.document import json_schema, reference
    from megazero.config.problems import likely_keys
    from megazero.config.schema import keys
    from megazero.registry import did_you_mean

    text = json.dumps(json_schema(), indent=1) + "\n" if schema else reference(name)
    if not text:
        home, _, last = name.rpartition(".")
        every = [f"{section}.{key}" for section, fields in keys().items() for key in fields]
        meant = did_you_mean(likely_keys(last, home, keys().get(home, ()), every), f"there are [{'], ['.join(keys())}]")
        fail(f"no section or key is named {name}: {meant}", EXIT_REFUSED)
    print(text, end="")
