"""What checkpoints of other frameworks add to the trunk; see `megazero.annexes`."""

ADDS = {
    "import": {"checkpoints": "megazero.formats.importer:import_checkpoint"},
    "pickled weights": {"torch.save": "megazero.formats.pickles:open_pickled_weights"},
    "export": {"dcp": "megazero.formats.exporter:export_dcp"},
}
