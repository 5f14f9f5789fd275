"""The commands of `distill`, a few related ones in a module. `service.cli.COMMANDS` names them all."""
