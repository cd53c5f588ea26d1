"""The command line: parse, call, print, exit codes; nothing else."""
