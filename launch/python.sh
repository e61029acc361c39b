#!/usr/bin/env bash
# The interpreter, as a script: srun looks for a program on the host before it enters a container, and there is no
# interpreter of the container's, or another one of that name.
exec "$PYTHON" "$@"
