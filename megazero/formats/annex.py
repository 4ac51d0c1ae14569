"""What files of other programs add to the trunk; see `megazero.annexes`."""

ADDS = {
    "command": {"data": "megazero.formats.data_command:app"},
    "checkpoint command": {"import": "megazero.formats.import_command:import_"},
    "export": {"dcp": "megazero.formats.exporter:export_dcp"},
}
