"""Several threads that come to need transformers at once all find it whole."""

from __future__ import annotations

import subprocess
import sys

# The other thread has begun when its parent package is in sys.modules, and has seconds to go.
SCRIPT = """
import sys, threading, time
from importlib import import_module
first = threading.Thread(target=import_module, args=("transformers.modeling_utils",))
first.start()
while "transformers" not in sys.modules:
    time.sleep(0.001)
from rlearner_text.transformers_import import import_transformers
import_transformers()
from transformers import AutoModelForCausalLM
print(AutoModelForCausalLM.__name__)
first.join()
"""


def test_a_thread_that_comes_in_the_middle_of_an_import_finds_its_names() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "AutoModelForCausalLM\n"), done.stderr
