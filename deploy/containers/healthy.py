#!/usr/bin/env python3
"""The health check of the images: exit code 0 if the process in the container says that it is
alive.

It asks /healthz of `--metrics-port`, at the port that RL_HEALTH_PORT names.
"""

import os
import sys
import urllib.request

url = f"http://127.0.0.1:{os.environ.get('RL_HEALTH_PORT', '9464')}/{sys.argv[1] if len(sys.argv) > 1 else 'healthz'}"
try:
    with urllib.request.urlopen(url, timeout=4) as answer:
        print(answer.read(200).decode(errors="replace").strip())
except OSError as error:  # of which HTTPError, for any status but 200, is one
    sys.exit(f"{url}: {error}")
