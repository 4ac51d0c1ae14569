"""What files of other programs add to the trunk; see `megazero.annexes`."""

ADDS = {
    "command": {"data": "megazero.formats.data_command:app"},
    "import": {"checkpoints": "megazero.formats.importer:import_checkpoint"},
    "pickled weights": {"torch.save": "megazero.formats.pickles:open_pickled_weights"},
    "export": {"dcp": "megazero.formats.exporter:export_dcp"},
}
