"""Writes TensorBoard event files in ``runs/<name>/tensorboard``."""

from __future__ import annotations

import io
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DataType
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.metadata import create_summary_metadata as hparams_metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
from tensorboard.plugins.text.metadata import create_summary_metadata as text_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from broker.contract.wire import PlainSettings
from broker.system.private_files import open_private, private_folder
from learner.reporting.trackers import flatten_settings


class TensorBoard:
    """A ``Tracker`` that keeps unwritten events while the disk is full.

    The thread of TensorBoard's own writer exits then.

    Args:
        args: ``filename_suffix``.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        project: str,
        config: PlainSettings,
        args: Mapping[str, Any],
    ) -> None:
        self._pending = bytearray()
        self._size = 0
        suffix = args.get("filename_suffix", "")
        process = f"{socket.gethostname()}.{os.getpid()}"
        name = f"events.out.tfevents.{int(time.time()):010d}.{process}.0{suffix}"
        target = folder / "tensorboard"
        private_folder(target)
        self._file = open_private(target / name, os.O_WRONLY | os.O_CREAT)
        self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._put(
            Event(wall_time=time.time(), summary=Summary(value=[_settings_value(run, config)]))
        )
        self._flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._write(
            step, [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )

    def texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._write(step, [_text_value(name, text) for name, text in texts.items()])

    def picture(self, step: int, name: str, gif: bytes) -> None:
        width, height = struct.unpack("<HH", gif[6:10])
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=gif)
        self._write(step, [Summary.Value(tag=name, image=image)])

    def close(self) -> None:
        try:
            self._flush()
        finally:
            os.close(self._file)

    def _write(self, step: int, values: list[Summary.Value]) -> None:
        self._put(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._flush()

    def _put(self, event: Event) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._pending += record.getvalue()

    def _flush(self) -> None:
        while self._pending:
            num_written = os.pwrite(self._file, self._pending, self._size)
            self._size += num_written
            del self._pending[:num_written]


def _text_value(name: str, text: str) -> Summary.Value:
    shape = TensorShapeProto(dim=[{"size": 1}])
    tensor = TensorProto(dtype=DataType.DT_STRING, string_val=[text.encode()], tensor_shape=shape)
    return Summary.Value(tag=name, metadata=text_metadata(name, ""), tensor=tensor)


def _settings_value(run: str, config: PlainSettings) -> Summary.Value:
    """Return every setting under its dotted name, for the HPARAMS page."""
    session = SessionStartInfo(group_name=run, start_time_secs=time.time())
    for name, value in flatten_settings(config).items():
        field = session.hparams[name]
        if isinstance(value, bool):
            field.bool_value = value
        elif isinstance(value, (int, float)):
            field.number_value = value
        else:
            field.string_value = str(value)
    data = HParamsPluginData(session_start_info=session)
    return Summary.Value(tag=SESSION_START_INFO_TAG, metadata=hparams_metadata(data))
