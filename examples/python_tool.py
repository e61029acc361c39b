"""A tool: a Python interpreter, rollout.environment.function_tool_path=examples/python_tool.py. It
needs Linux with user namespaces, and util-linux.

Each call is a new process with limits of time, memory and output, without a network, and with files
of its own: Python and the system's libraries, read-only, and an empty /tmp of 64 MB in memory.

What it does not protect from: a fault of the kernel, which is the host's; a program that reads what
/usr has; one that starts many processes, each with the memory of the limit, until the time of the
call is over. Code that is not trusted needs a virtual machine.
"""

import asyncio
import os
import sys

SECONDS = 10.0
MEMORY = 1 << 20
"""kB of address space."""
MOST_BYTES = 1 << 16
"""Of output; the process is then ended."""
_SETUP = f"""
set -e
mount -t tmpfs -o size=64m,mode=755 tmpfs /tmp
for directory in /bin /lib /lib64 /usr {sys.base_prefix}; do
  if [ -e "$directory" ]; then
    mkdir -p "/tmp$directory"
    mount --bind "$directory" "/tmp$directory"
    mount -o remount,bind,ro "/tmp$directory"
  fi
done
mkdir /tmp/tmp
ulimit -c 0; ulimit -v {MEMORY}; ulimit -t {SECONDS:.0f}
cd /tmp
exec chroot /tmp setpriv --no-new-privs --bounding-set=-all --inh-caps=-all \
  {os.path.realpath(sys.executable)} -I -
"""
_COMMAND = [
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--ipc",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
]


async def python(code: str) -> str:
    """Run a Python program. Return what it prints.

    Args:
        code: The program. Each call begins anew: nothing is kept of earlier ones.
    """
    process = await asyncio.create_subprocess_exec(
        *_COMMAND,
        "sh",
        "-c",
        _SETUP,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "OMP_NUM_THREADS": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(SECONDS):
            process.stdin.write(code.encode())
            process.stdin.write_eof()
            try:
                output = await process.stdout.readexactly(MOST_BYTES)
            except asyncio.IncompleteReadError as error:
                output = error.partial
                await process.wait()
    except TimeoutError:
        return f"Error: no end after {SECONDS} s"
    finally:
        if process.returncode is None:
            process.kill()  # and with it all that it has started
            await process.communicate()
    return output.decode(errors="replace")
