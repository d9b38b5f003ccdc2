"""Waits until some replica behind the metrics Service says that it leads; exit status 1 after two minutes."""

import sys
import time
import urllib.request

url, end, said = sys.argv[1], time.monotonic() + 120, ""
while time.monotonic() < end:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - the chart gives the address
            lines = answer.read().decode().splitlines()
        if "dlo_leader 1.0" in lines:
            sys.stdout.write("the operator leads\n")
            sys.exit(0)
        said = "it answers, and does not lead"
    except OSError as error:
        said = str(error)
    time.sleep(2)
sys.exit(f"{url}: {said}")
