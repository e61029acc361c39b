"""The parts of tools/gpu_check.py. catalog.py lists them, report.py is what a part records,
processes.py runs each in a process of its own. The parts themselves are in *_parts.py, by subject;
the other modules are what they share, in part with the tests. tests/gpu runs all parts on a CPU."""
