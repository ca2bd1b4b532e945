"""The `octavo` command, one file a subcommand."""
