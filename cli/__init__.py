"""The command line. Modules here import only the dependencies of `--help`; a command imports the rest when it runs."""
