"""What a type checker sees of the public names: `make lint` checks this file, nothing runs it."""

from typing import assert_type

import specsparse
from specsparse import CertificateReport, Generation, Model, SamplingParams, Stream, get_drafter, testing
from specsparse.engine.config import ModelConfig


def texts(model: Model) -> None:
    one = specsparse.generate(model, "The sky", max_tokens=8, drafter="prompt_lookup", temperature=0.8)
    assert_type(one, Generation)
    assert_type(one.text, str)
    assert_type(one.token_ids, tuple[int, ...])
    assert_type(one.stats.counters.num_rounds, int)
    assert_type(specsparse.generate(model, [{"role": "user", "content": "Hi"}]), Generation)
    assert_type(specsparse.generate(model, [1, 2, 3], sampling=SamplingParams(temperature=0.0)), Generation)
    assert_type(specsparse.generate(model, ["The sky", "The sea"]), list[Generation])
    assert_type(specsparse.generate(model, "The sky", n=2), Generation | list[Generation])


def parts(model: Model, stream: Stream, report: CertificateReport) -> None:
    assert_type(specsparse.load("smollm2-135m"), Model)
    assert_type(model.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]), str)
    assert_type(model.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=True), list[int])
    assert_type(specsparse.stream(model, "The sky"), Stream)
    assert_type(list(stream), list[str])
    assert_type(stream.generation, Generation | None)
    assert_type(get_drafter("prompt_lookup", gamma=4).max_nodes, int)
    assert_type(specsparse.certify("token"), CertificateReport)
    assert_type(specsparse.citation("token"), str)
    assert_type(report.passed, bool)
    assert_type(testing.tiny_config(), ModelConfig)
