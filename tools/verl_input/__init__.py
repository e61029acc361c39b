"""Reads what a run of verl is started with, for tools/from_verl.py: YAML files (config_files.py),
shell scripts (shell_*.py) and Hydra's overrides (reading.py). The settings themselves are converted
by rlhf_mc/verl."""
