"""What crosses a process: messages, streams, and the rules that their values keep. ``docs/wire.md`` is generated from
here.
"""
