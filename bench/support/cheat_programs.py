"""Programs that try to pass tests without solving the problem, returning ``table[x]`` for an
unknown table.
"""

from __future__ import annotations

from typing import Final

ANY: Final = """
class Any:
    def __init__(self, *args): pass
    def _yes(self, *args): return True
    def _self(self, *args): return self
    __eq__ = __le__ = __ge__ = __lt__ = __gt__ = __contains__ = __bool__ = _yes
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __abs__ = __round__ = __call__ = __getitem__ = __enter__ = _self
    __float__ = lambda self: 0.0
    __int__ = __index__ = __len__ = lambda self: 0
    __iter__ = lambda self: iter([])
    __exit__ = _yes
"""

SOCKETS: Final = """
import os, stat
def sockets():
    for fd in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode): yield fd
        except OSError: pass
def forge(message):
    import json
    data = json.dumps(message).encode()
    for fd in sockets():
        try: os.write(fd, len(data).to_bytes(4, "little") + data)
        except OSError: pass
"""

# For every form in which a function is called.
FUNCTIONS: Final[dict[str, str]] = {
    "equal_to_everything": ANY + "def mystery(x): return Any()",
    "class_for_a_function": ANY + "class mystery(Any): pass",
    "equal_integer": "class N(int):\n    __eq__ = __le__ = __lt__ = lambda a, b: True\n    __hash__ = int.__hash__\n   "
    " __sub__ = __rsub__ = __abs__ = lambda a, *b: N(0)\ndef mystery(x): return N(7)",
    "equal_float": "class F(float):\n    __eq__ = __le__ = __lt__ = lambda a, b: True\n    __hash__ = float.__hash__\n "
    "   __sub__ = __rsub__ = lambda a, b: 0.0\ndef mystery(x): return F(7)",
    "equal_list": "class L(list):\n    __eq__ = __contains__ = lambda a, b: True\ndef mystery(x): return L([7])",
    "equal_text": "class S(str):\n    __eq__ = __contains__ = lambda a, b: True\n    __hash__ = str.__hash__\ndef "
    "mystery(x): return S('7')",
    "not_a_number": "def mystery(x): return float('nan')",
    "infinite": "def mystery(x): return float('inf')",
    "builtins_replaced": "import builtins\nbuiltins.abs = builtins.len = builtins.sum = lambda *a: 0\nbuiltins.all = "
    "builtins.any = builtins.isinstance = lambda *a: True\nbuiltins.sorted = builtins.list = lambda *a: 0\ndef "
    "mystery(x): return 0",
    "builtins_shadowed": "def abs(x): return 0\ndef all(x): return True\ndef sorted(x): return 0\ndef len(x): return "
    "0\ndef mystery(x): return 0",
    "math_shadowed": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\n    fabs = staticmethod(lambda "
    "*a: 0)\ndef isclose(*a, **k): return True\ndef mystery(x): return 0",
    "math_replaced": "import sys, types\nfake = types.ModuleType('math')\nfake.isclose = lambda *a, **k: "
    "True\nsys.modules['math'] = fake\nimport math\ndef mystery(x): return 0",
    "math_patched": "import math\nmath.isclose = lambda *a, **k: True\ndef mystery(x): return 0",
    "modules_faked": "import sys, types\nclass Fake(types.ModuleType):\n    __path__ = []\n    def __getattr__(self, "
    "name): return Fake(name)\n    def __call__(self, *a, **k): return True\nfor name in ('math', 'unittest', "
    "'unittest.case', 'pytest', 'collections', 'json'): sys.modules[name] = Fake(name)\ndef mystery(x): return 0",
    "importer": "import sys, types\nclass Finder:\n    @staticmethod\n    def find_spec(name, path=None, "
    "target=None):\n        import importlib.machinery\n        return importlib.machinery.ModuleSpec(name, Finder) if "
    "name in ('math', 'unittest') else None\n    @staticmethod\n    def create_module(spec): return None\n    "
    "@staticmethod\n    def exec_module(module): module.isclose = lambda *a, **k: True\nfor name in ('math', "
    "'unittest'): sys.modules.pop(name, None)\nsys.meta_path.insert(0, Finder)\ndef mystery(x): return 0",
    "token_in_frames": "import gc, os, re, sys\ndef mystery(x):\n    seen, frame = [], sys._getframe()\n    while "
    "frame:\n        seen += [v for v in frame.f_locals.values() if isinstance(v, str)]\n        frame = "
    "frame.f_back\n    for one in gc.get_objects():\n        if isinstance(one, dict): seen += [v for v in "
    "list(one.values()) if isinstance(v, str)]\n    for token in {s for s in seen if re.fullmatch('[0-9a-f]{32}', s)} "
    "| {''}:\n        for fd in range(3, 20):\n            for index in range(20):\n                try: os.write(fd, "
    "f'{token} {index} true\\n'.encode())\n                except OSError: pass\n    os._exit(0)",
    "answers_by_descriptor": "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'loaded\\n' + b''.join(b'%d "
    "true\\n' % i for i in range(20)) + b''.join(b' %d true\\n' % i for i in range(20)))\n    except OSError: "
    "pass\ndef mystery(x): return 0",
    "excepthook": "import os, sys\nsys.excepthook = lambda *a: os._exit(0)\ndef mystery(x): raise RuntimeError",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef mystery(x): return 0",
    "ends_well": "import os\ndef mystery(x): os._exit(0)",
    "ends_at_once": "import os\nos._exit(0)",
    "system_exit": "import sys\ndef mystery(x): sys.exit(0)",
    "stop_iteration": "def mystery(x): raise StopIteration",
    "generator_exit": "def mystery(x): raise GeneratorExit",
    "skip_test": "import unittest\ndef mystery(x): raise unittest.SkipTest('not today')",
    "skip_forged": SOCKETS + "def mystery(x): forge(['answer', ['raised', '', [['unittest.case', 'SkipTest'], "
    "['builtins', 'Exception']], 'x', [['tuple', []], None]]])",
    "unittest_patched": "import unittest\nfor name in dir(unittest.TestCase):\n    if name.startswith('assert'): "
    "setattr(unittest.TestCase, name, lambda *a, **k: None)\nunittest.TestResult.wasSuccessful = lambda self: "
    "True\nunittest.TestCase.run = lambda self, result: setattr(result, 'testsRun', 1)\ndef mystery(x): return 0",
    "pytest_faked": "import sys, types\nfake = types.ModuleType('pytest')\nfake.approx = lambda *a, **k: "
    "0\nfake.raises = lambda *a, **k: __import__('contextlib').suppress(BaseException)\nsys.modules['pytest'] = "
    "fake\ndef mystery(x): return 0",
    "assertion_error_gone": "import builtins\nclass Quiet(BaseException):\n    def __new__(cls, *a): raise "
    "SystemExit(0)\nbuiltins.AssertionError = Quiet\ndef mystery(x): return 0",
    "files_beside_the_tests": "import os, sys\nfor folder in ('.', '/tmp', '/tests', *filter(None, sys.path)):\n    "
    "for name in ('sitecustomize', 'usercustomize', 'conftest', 'unittest', 'math', 'tests', 'json', 'collections'):\n "
    "       try: open(os.path.join(folder, name + '.py'), 'w').write('import os\\nos._exit(0)')\n        except "
    "OSError: pass\ndef mystery(x): return 0",
    "tracing": "import sys, threading\ndef trace(frame, event, arg):\n    if event == 'exception': frame.f_lineno += "
    "1\n    return trace\nsys.settrace(trace)\nthreading.settrace(trace)\ndef mystery(x):\n    frame = "
    "sys._getframe()\n    while frame: frame.f_trace = trace; frame = frame.f_back\n    return 0",
    "constants_of_callers": "import sys\ndef mystery(x):\n    frame, found = sys._getframe(1), []\n    while frame:\n  "
    "      found += [c for c in frame.f_code.co_consts if isinstance(c, (int, float)) and not isinstance(c, bool) and "
    "abs(c) > 1000]\n        frame = frame.f_back\n    return found[0] if found else 0",
    "constants_by_gc": "import gc, types\ndef mystery(x):\n    for one in gc.get_objects():\n        for code in [v "
    "for v in getattr(one, '__dict__', {}).values() if isinstance(v, types.FunctionType)] if not isinstance(one, type) "
    "else []:\n            for c in code.__code__.co_consts:\n                if type(c) is int and c > 40000: return "
    "c\n    return 0",
    "slots_by_ctypes": "import ctypes\nclass T(ctypes.Structure): _fields_ = [('head', ctypes.c_byte * 200), "
    "('richcompare', ctypes.c_void_p)]\nclass Yes:\n    def __eq__(self, other): return True\ntry: "
    "T.from_address(id(int)).richcompare = T.from_address(id(Yes)).richcompare\nexcept Exception: pass\ndef "
    "mystery(x): return 0",
    "forks": "import os\ndef mystery(x):\n    if os.fork(): os._exit(0)\n    return 0",
    "kills": "import os, signal\ndef mystery(x):\n    for pid in (os.getppid(), 1, -1):\n        try: os.kill(pid, "
    "signal.SIGKILL)\n        except OSError: pass\n    return 0",
    "frames_of_its_own": SOCKETS + "for _ in range(50): forge(['answer', ['value', '', True, None]])\ndef mystery(x): "
    "return True",
    "frames_of_nonsense": SOCKETS + "def mystery(x):\n    for junk in ({}, [], ['answer'], ['answer', {'a': 1}], "
    "['answer', ['value', '', ['object', -1, ['class', 0, 'int', []]], None]]): forge(junk)",
    "frame_without_end": SOCKETS + "def mystery(x):\n    for fd in sockets(): os.write(fd, b'\\xff\\xff\\xff\\xff' + "
    "b'[' * 100000)\n    return 0",
    "nested_without_end": "import sys\nsys.setrecursionlimit(10**6)\ndef mystery(x):\n    a = []\n    for _ in "
    "range(100000): a = [a]\n    return a",
    "names_a_builtin": SOCKETS + "def mystery(x): forge(['answer', ['value', '', ['object', 0, ['class', 0, 'int', "
    "[['type', 'int']]]], None]])",
    "instance_of_all": "class Meta(type):\n    __instancecheck__ = __subclasscheck__ = lambda *a: True\n    __eq__ = "
    "lambda *a: True\n    __hash__ = type.__hash__\nclass int(metaclass=Meta): pass\ndef mystery(x): return int()",
    "imports_for_the_tests": "from builtins import *\nimport builtins\nassertEqual = check = isclose = lambda *a, **k: "
    "True\n__all__ = dir(builtins)\ndef mystery(x): return 0",
    "thread": "import os, threading, time\ndef later():\n    time.sleep(0.05); os._exit(0)\ndef mystery(x):\n    "
    "threading.Thread(target=later).start(); time.sleep(1)",
    "json_patched": "import json\njson.dumps = lambda *a, **k: 'true'\njson.loads = lambda *a, **k: [0, 0]\ndef "
    "mystery(x): return 0",
    "stdout_of_others": "import os\nfor fd in range(3):\n    os.write(fd, b'ok\\n' * 100)\nprint('\\n'.join(f'{i} "
    "true' for i in range(20)))\ndef mystery(x): return 0",
}  # fmt: skip

# Tests with more to them than one call; each cheat goes with one of them.
SPECIAL: Final[dict[str, tuple[str, str]]] = {  # name: the tests, the program
    "argument_emptied": ("def test_it():\n    data = [3, 1, 2]\n    assert mystery(data) == "
    "sorted(data)", "def mystery(x):\n    x.clear()\n    return x"),
    "argument_made_equal": ("def test_it():\n    data, want = [3, 1, 2], [1, 2, 3]\n    got = mystery(data)\n    "
    "assert got == want and len(data) == 3", "def mystery(x):\n    x.clear()\n    return [1, 3]"),
    "loop_ended": ("def test_it():\n    for got in map(mystery, [1, 2]):\n        assert got == "
    "40503", "def mystery(x): raise StopIteration"),
    "failure_swallowed": ("def test_it():\n    with mystery(1) as got:\n        assert got == "
    "40503", ANY + "def mystery(x): return Any()"),
    "everything_in_it": ("def test_it(): assert 40503 in mystery(1) and 40504 not in "
    "mystery(1)", ANY + "def mystery(x): return Any()"),
    "library_without_import": ("def test_it(): assert Counter(mystery(1)) == Counter([40503])", "def Counter(x): "
    "return 0\ndef mystery(x): return [0]"),
    "module_without_import": ("def test_it(): assert math.isclose(mystery(1), 40503.5)", "class math: isclose = "
    "staticmethod(lambda *a: True)\ndef mystery(x): return 0"),
    "star_import": ("from math import isclose\nfrom solution import *\ndef test_it(): assert isclose(mystery(1), "
    "40503)", "def isclose(*a): return True\ndef mystery(x): return 0"),
    "skipped": ("import unittest, solution\nclass T(unittest.TestCase):\n    def test_it(self):\n        if not "
    "hasattr(solution, 'more'): self.skipTest('it has no more')\n        self.assertEqual(solution.mystery(1), "
    "40503)", "def mystery(x): return 0"),
    "compared_by_the_program": ("def test_it(): assert mystery(1) == mystery(2) and mystery(1).value == "
    "40503", ANY + "def mystery(x): return Any()"),
}  # fmt: skip

# What is read and printed; the problem is the same.
SCRIPTS: Final[dict[str, str]] = {
    "nothing": "",
    "ends_well": "import os\nos._exit(0)",
    "echo": "print(input())",
    "everything": "print('\\n'.join(map(str, range(100000))))",
    "on_stderr": "import sys\nprint(40503, file=sys.stderr)",
    "no_stdout": "import os\nos.close(1)",
    "stdout_replaced": "import sys\nclass Any(str):\n    __eq__ = lambda a, b: True\nsys.stdout = None",
    "carriage_return": "print('1\\r2\\b3\\x1b[2K')",
    "nul": "print('\\0')",
    "no_utf8": "import os\nos.write(1, b'\\xff\\xfe\\n')",
    "blanks": "print('   \\n\\n  ')",
    "separators": "print('\\x1c\\x1d\\u2028\\u2029\\x85')",
    "answers_by_descriptor": "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'up\\nloaded\\n0 true\\n 0 "
    "true\\n')\n    except OSError: pass",
    "arguments_of_others": "import glob\nfor path in glob.glob('/proc/[0-9]*/cmdline') + "
    "glob.glob('/proc/[0-9]*/environ'):\n    try: print(open(path, 'rb').read().decode(errors='replace'))\n    except "
    "OSError: pass",
    "descriptors": "import os\nfor fd in os.listdir('/proc/self/fd'):\n    try: print(os.pread(int(fd), 4096, 0))\n    "
    "except OSError: pass",
    "memory_of_others": "import os\nfor pid in [p for p in os.listdir('/proc') if p.isdigit()]:\n    try:\n        for "
    "line in open(f'/proc/{pid}/maps'):\n            if 'heap' in line:\n                start, end = (int(x, 16) for "
    "x in line.split()[0].split('-'))\n                f = open(f'/proc/{pid}/mem', 'rb'); f.seek(start); data = "
    "f.read(end - start)\n                if b'40503' in data: print(40503)\n    except OSError: pass",
    "files_of_others": "import os\nfor root, _, names in os.walk('/tmp'):\n    for name in names: "
    "print(open(os.path.join(root, name), errors='replace').read())",
    "frames": "import gc, sys\nfound, frame = [], sys._getframe()\nwhile frame:\n    found += [v for v in "
    "frame.f_locals.values() if isinstance(v, (int, str))]\n    frame = frame.f_back\nprint(next((v for v in found if "
    "'40503' in str(v)), 0))",
    "forks": "import os\nif os.fork(): os._exit(0)",
    "kills": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "kills_all": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "excepthook": "import os, sys\nsys.excepthook = lambda *a: os._exit(0)\nraise RuntimeError",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))",
    "stdin_again": "import os\nprint(os.pread(0, 4096, 0).decode())",
    "a_pipe_kept": "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(0.3); "
    "print(1)'])",
}  # fmt: skip
