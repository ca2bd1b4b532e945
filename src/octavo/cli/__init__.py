"""The `octavo` command, one file per subcommand."""
