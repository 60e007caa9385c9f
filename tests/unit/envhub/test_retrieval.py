"""The retriever: exact and approximate search, the encoder, the server in Search-R1's form, and the
search environment as its client.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from broker.errors import ConfigError
from envhub.envs.retrieval.client import RetrieverDown, retrieve
from envhub.envs.retrieval.encoder import EncoderOptions
from envhub.envs.retrieval.indexes import ExactIndex, GraphIndex, Vectors, load_index
from envhub.envs.retrieval.retriever import DenseRetriever, WordRetriever, load_dense
from envhub.envs.retrieval.server import RetrieverServer
from envhub.envs.tools.corpus import Corpus, read_corpus
from envhub.envs.tools.search_qa import SearchArgs, SearchQA

ROWS = [
    {"title": "Hats", "contents": "Red hats are made in Milan."},
    {"contents": "Scarves come from Oslo."},
    {"title": "Gloves", "contents": "Gloves are knitted in Riga."},
]


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    return path


@pytest.fixture
def corpus(corpus_file: Path) -> Corpus:
    return read_corpus(str(corpus_file), "contents", "title")


def unit_vectors(count: int, dimensions: int = 32, seed: int = 0) -> Vectors:
    vectors = np.random.default_rng(seed).normal(size=(count, dimensions)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_exact_search_returns_the_nearest_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = unit_vectors(50)
    # several parts
    monkeypatch.setattr("envhub.envs.retrieval.indexes.MAX_SCORES", 100)
    positions, scores = ExactIndex(vectors).search(vectors[:5], 3)
    assert positions[:, 0].tolist() == [0, 1, 2, 3, 4]
    expected = np.sort(vectors[:5] @ vectors.T, axis=1)[:, :-4:-1]
    assert scores == pytest.approx(expected, abs=1e-5)


def test_fewer_vectors_than_asked_for(tmp_path: Path) -> None:
    index = ExactIndex(unit_vectors(2))
    index.save(tmp_path / "index")
    positions, scores = load_index("exact", tmp_path / "index").search(unit_vectors(1), 4)
    assert positions[0, 0] == 0
    assert positions[0, 2:].tolist() == [-1, -1]
    assert scores[0, 2:].tolist() == [0.0, 0.0]


def test_a_graph_finds_what_exact_search_finds(tmp_path: Path) -> None:
    pytest.importorskip("usearch", reason="needs rlearner[retriever]")
    vectors = unit_vectors(2000)
    queries = unit_vectors(50, seed=1)
    GraphIndex.build(vectors).save(tmp_path / "index")
    positions, scores = load_index("hnsw", tmp_path / "index").search(queries, 10)
    exact, exact_scores = ExactIndex(vectors).search(queries, 10)
    shared = [len(set(row) & set(other)) for row, other in zip(positions, exact, strict=True)]
    assert sum(shared) / (50 * 10) >= 0.95
    assert scores[:, 0] == pytest.approx(exact_scores[:, 0], abs=0.05)


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny BERT with random weights, and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = str(tmp_path_factory.mktemp("encoder"))
    words = "[PAD] [UNK] [CLS] [SEP] red hats are made in milan . scarves come from oslo gloves "
    vocabulary = {word: number for number, word in enumerate((words + "knitted riga").split())}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]"
    )
    fast.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_index_of_a_corpus_is_kept_and_read_again(
    corpus: Corpus,
    encoder_folder: str,
    tmp_path: Path,
    pooling: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = EncoderOptions(encoder_folder, pooling)
    store = tmp_path / "store"
    first = load_dense(corpus, options, "exact", store)
    texts = [
        f"{title} {text}".strip() for title, text in zip(corpus.titles, corpus.texts, strict=True)
    ]
    for place, text in enumerate(texts):
        (documents,) = first.search([text], 2)
        assert documents[0].position == place
        assert documents[0].score == pytest.approx(1.0, abs=1e-5)
    encoded: list[int] = []
    from envhub.envs.retrieval.encoder import TextEncoder

    monkeypatch.setattr(
        TextEncoder, "encode_passages", lambda self, texts: encoded.append(len(texts))
    )
    second = load_dense(corpus, options, "exact", store)
    assert encoded == []
    assert second.search([texts[1]], 3) == first.search([texts[1]], 3)
    assert isinstance(second, DenseRetriever)


@pytest.fixture
async def server(corpus: Corpus) -> AsyncIterator[TestServer]:
    app = RetrieverServer(corpus, WordRetriever(corpus), topk=1, api_key="let-me-in-please").app()
    async with TestServer(app) as server:
        yield server


async def test_the_server_speaks_search_r1(server: TestServer) -> None:
    url = str(server.make_url("/retrieve"))
    headers = {"Authorization": "Bearer let-me-in-please"}
    body = {"queries": ["scarves", "red hats and gloves"], "topk": 2, "return_scores": True}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(url, json=body) as reply:
            result = (await reply.json())["result"]
        assert result[0] == [
            {"document": {"id": "1", "contents": "\nScarves come from Oslo."}, "score": 0.0}
        ]
        assert {entry["document"]["id"] for entry in result[1]} == {"0", "2"}
        async with session.post(url, json={"queries": ["red hats and gloves"]}) as reply:
            (documents,) = (await reply.json())["result"]
        assert [document["contents"].partition("\n")[0] for document in documents] == ["Hats"]
        for bad in ({"queries": "x"}, {"queries": [], "topk": 0}, {"queries": ["x"] * 257}):
            async with session.post(url, json=bad) as reply:
                assert reply.status == 400
                assert "\n" not in (await reply.json())["error"]
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
        assert reply.status == 401


async def test_queries_that_wait_are_searched_together(corpus: Corpus) -> None:
    sizes: list[int] = []

    class Counting(WordRetriever):
        def search(self, queries: Any, limit: int) -> Any:
            sizes.append(len(queries))
            return super().search(queries, limit)

    retriever = Counting(corpus)
    server = TestServer(RetrieverServer(corpus, retriever, topk=1).app())
    body = {"queries": ["scarves"] * 100}
    async with server, aiohttp.ClientSession() as session:
        reply = await session.post(str(server.make_url("/retrieve")), json=body)
        assert len((await reply.json())["result"]) == 100
    assert sizes == [64, 36]


def questions(folder: Path) -> str:
    path = folder / "questions.jsonl"
    path.write_text('{"question": "Where from?", "answer": "Oslo"}\n' * 2, encoding="utf-8")
    return str(path)


async def test_the_search_environment_asks_a_retriever(
    server: TestServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINDER_KEY", "let-me-in-please")
    args = SearchArgs.model_validate(
        {
            "retriever": str(server.make_url("")),
            "retriever_api_key": {"env": "FINDER_KEY"},
            "path": questions(tmp_path),
            "document_chars": 12,
        }
    )
    await asyncio.to_thread(SearchQA.check, args)
    environment = SearchQA(args)
    environment.reset(0, "train", 0)
    step = await asyncio.to_thread(environment.step, "<search>red hats</search>")
    assert step.observation.text == "<information>\n(1) Hats: Red hats ar…\n</information>"
    await server.close()
    with pytest.raises(RetrieverDown, match="no retriever at http://127"):
        await asyncio.to_thread(environment.step, "<search>red hats</search>")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((500, "broken\nhere"), "answered 500: broken here"),
        ((200, "[]"), "not a result"),
        ((200, '{"result": [[{"document": {"contents": 3}}]]}'), "not a result"),
        ((200, '{"result": [[], []]}'), "not a result"),
    ],
)
async def test_other_answers_are_one_line(answer: tuple[int, str], expected: str) -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=answer[0], text=answer[1])

    app = web.Application()
    app.router.add_post("/retrieve", handle)
    async with TestServer(app) as server:
        with pytest.raises(RetrieverDown) as caught:
            await asyncio.to_thread(retrieve, str(server.make_url("/retrieve")), "x", 1, 5.0)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({}, "corpus"),
        ({"corpus": "c.jsonl", "retriever": "http://127.0.0.1:9"}, "corpus"),
        ({"retriever": "host:8000"}, "retriever"),
        ({"retriever": "http://127.0.0.1:9"}, "retriever"),
    ],
)
def test_bad_arguments_of_the_search_environment(
    tmp_path: Path, args: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        SearchQA.check(SearchArgs.model_validate({"path": questions(tmp_path), **args}))
    assert caught.value.key == key


@pytest.fixture
def retriever_process(corpus_file: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "envhub.cli", "retriever", str(corpus_file), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(os.environ)) as child:
        assert child.stdout is not None
        try:
            yield json.loads(child.stdout.readline())["url"]
        finally:
            child.terminate()
            assert child.wait() == 0


def test_the_command_serves_a_corpus(retriever_process: str) -> None:
    with urllib.request.urlopen(f"{retriever_process}/health") as reply:
        assert json.load(reply) == {"status": "serving", "documents": 3}
    assert retrieve(retriever_process, "oslo", 1, 10.0) == ["\nScarves come from Oslo."]


@pytest.mark.parametrize(
    "options", [["--host", "0.0.0.0"], ["--topk", "101"], ["--encoder", "/no/such/folder"]]
)
def test_bad_options_are_one_line(corpus_file: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "envhub.cli", "retriever", str(corpus_file), *options]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert options[0] in ended.stderr
    assert "Traceback" not in ended.stderr
