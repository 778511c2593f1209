"""The command line. Modules here import only what `--help` needs; a command imports the rest when it runs."""
