"""Runs inside before the program, sent as code. Imports little: a module costs a millisecond."""

# ruff: noqa: BLE001, SIM105 - a program may raise anything; contextlib costs a millisecond

MODULES = globals().get("modules", {})  # code by name of a module of ours


def boot_program() -> None:
    import builtins
    import os
    import resource
    import sys
    from _sitebuiltins import Quitter

    fd, uid, processes, cpu, memory, files, file_bytes, channel = map(int, sys.argv[1:9])
    mode = sys.argv[9]
    sys.path += sys.argv[10:]
    del sys.argv[1:]

    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        # Make sure that there is no way back to root.
        try:
            os.setuid(0)
        except PermissionError:
            pass
        else:
            os._exit(1)

    def limit(resource_id: int, soft: int, hard: int = 0) -> None:
        most = resource.getrlimit(resource_id)[1]
        hard = hard or soft
        if most != resource.RLIM_INFINITY:
            soft = min(soft, most)
            hard = min(hard, most)
        resource.setrlimit(resource_id, (soft, hard))

    # RLIMIT_AS counts what the interpreter has mapped already.
    with open("/proc/self/statm") as statm:
        memory += int(statm.read().split()[0]) * resource.getpagesize()
    if processes:
        limit(resource.RLIMIT_NPROC, processes)
    limit(resource.RLIMIT_STACK, 64 << 20)
    limit(resource.RLIMIT_CPU, cpu, cpu + 1)
    limit(resource.RLIMIT_AS, memory)
    limit(resource.RLIMIT_NOFILE, files)
    limit(resource.RLIMIT_FSIZE, file_bytes)
    limit(resource.RLIMIT_CORE, 0)
    if hasattr(resource, "RLIMIT_MSGQUEUE"):
        limit(resource.RLIMIT_MSGQUEUE, 0)
    # Without ``site``, which costs half a start.
    for name in ("exit", "quit"):
        setattr(builtins, name, Quitter(name, "Ctrl-D (i.e. EOF)"))
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in (fd, channel):
            try:
                os.close(int(name))
            except OSError:
                # The descriptor that listed them.
                pass
    for open_fd in {fd, channel} - {-1}:
        os.set_inheritable(open_fd, False)

    def load_attribute(name: str, attribute: str):  # type: ignore[no-untyped-def]
        """Return an attribute of one of our modules, which were sent as code."""
        for module, code in MODULES.items():
            sys.modules[module] = type(sys)(module)
            exec(code, vars(sys.modules[module]))
        return vars(sys.modules[name])[attribute]

    def say(text: str) -> None:
        data = text.encode() + b"\n"
        while data:
            data = data[os.write(fd, data) :]

    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = os.read(fd, count - len(data))
            if not more:
                os._exit(1)
            data += more
        return data

    def take() -> str:
        return exactly(int.from_bytes(exactly(4), "little")).decode()

    def give_up() -> None:
        if isinstance(sys.exception(), MemoryError):
            os._exit(86)
        sys.excepthook(*sys.exc_info())
        os._exit(1)

    say("up")
    if mode == "tests":
        load_attribute("rlearner_sandbox.judge", "run_tests")(channel, say, take)
    program = take()
    module = type(sys)("__main__" if mode == "script" else "solution")
    sys.modules[module.__name__] = module
    try:
        code = compile(program, "<program>", "exec", dont_inherit=True)
    except MemoryError:
        os._exit(86)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(87)
    scope = module.__dict__
    if mode == "script":
        os.close(fd)
        try:
            exec(code, scope)
        except MemoryError:
            os._exit(86)
        return
    try:
        exec(code, scope)
    except BaseException:
        give_up()
    say("loaded")
    if mode == "asserts":
        os.close(fd)
        load_attribute("rlearner_sandbox.host", "Host")(channel, scope).serve()
    import json

    token = take()
    first = take()
    num_tests = int(take())
    tests = [take() for _ in range(num_tests)]
    try:
        function = scope[first] if first in scope else getattr(scope["Solution"](), first)
    except BaseException:
        give_up()
    for index, test in enumerate(tests):
        try:
            say(f"{token} {index} {json.dumps(function(*json.loads(test)))}")
        except MemoryError:
            os._exit(86)
        except BaseException:
            sys.excepthook(*sys.exc_info())
    os._exit(0)


boot_program()
