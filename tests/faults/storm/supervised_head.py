"""`ray start --head` whose GCS starts again after some seconds when it is killed. It wants storage that outlives it.

A program by itself: `supervised_head.py PYTHON -m ray.scripts.scripts start --head …`.
"""

import sys
import tempfile
from pathlib import Path

AGAIN = """\
#!/bin/bash
while true; do
    "{executable}" "$@"
    sleep $((RANDOM % 6))
done
"""

if __name__ == "__main__":
    from ray._private import services
    from ray.scripts.scripts import main

    with tempfile.TemporaryDirectory(prefix="rd-", ignore_cleanup_errors=True) as folder:
        script = Path(folder, "gcs")
        script.write_text(AGAIN.format(executable=services.GCS_SERVER_EXECUTABLE))
        script.chmod(0o700)
        services.GCS_SERVER_EXECUTABLE = str(script)
        sys.argv = ["ray", *sys.argv[sys.argv.index("start") :]]
        main()
