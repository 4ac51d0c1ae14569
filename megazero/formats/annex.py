"""What files of other programs add to the trunk; see `megazero.annexes`."""

ADDS = {
    "command": {"data": "megazero.formats.data_command:app"},
    "checkpoint command": {
        "import": "megazero.formats.import_command:import_",
        "average": "megazero.formats.averaging:average",
    },
    "token file": dict.fromkeys((".bin", ".npy", ".ds"), "megazero.formats.raw_tokens:pair_of"),
    "export": {"dcp": "megazero.formats.exporter:export_dcp"},
}
