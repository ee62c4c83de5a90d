"""The command line: arguments and settings checked, folders, processes, resuming, the terminal."""
