"""The flags of llama.cpp and vLLM on every command that decodes; parsed only."""

import importlib

import pytest

from specsparse.cli import arguments
from specsparse.cli import main as cli
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError

MODEL = ["-m", "a.gguf", "-c", "512", "-t", "2", "--kv-dtype", "q8_0", "--mesh", "2", "--kernels", "xla"]
LOADED = {"kv_dtype": "q8_0", "threads": 2, "backend": "xla", "mesh": 2, "context_length": 512}
SAMPLING = ["--temp", "0.8", "--top-k", "40", "--top-p", "0.9"]
COMMANDS = {
    "generate": "specsparse.cli.generate", "chat": "specsparse.tools.chat", "serve": "specsparse.tools.serve",
    "profile": "specsparse.tools.profile",
}  # fmt: skip


def parsed(name, *argv):
    parser = cli.Parser(prog=name, allow_abbrev=False)
    if name == "bench":
        module = importlib.import_module("specsparse.tools.bench")
        module.add_arguments(parser)
        args = parser.parse_args(module.rewritten(argv))
    else:
        importlib.import_module(COMMANDS[name]).add_arguments(parser)
        args = parser.parse_intermixed_args(argv)
    arguments.settle(args)
    return args


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_options_of_model_drafts_and_sampling(name):
    args = parsed(name, *MODEL, *SAMPLING)
    assert args.model == "a.gguf" and arguments.load_options(args) == LOADED
    params = arguments.sampling_params(args)
    assert (params.temperature, params.top_k, params.top_p) == (0.8, 40, 0.9)
    spec = arguments.method_of(args, params)
    assert spec.drafter.name == "prompt_lookup"
    for flag in ("--gamma", "--draft-max", "--spec-draft-n-max"):
        spec = arguments.method_of(parsed(name, flag, "3", "--spec-type", "ngram-simple"), params)
        assert (spec.drafter.name, spec.policy.name, spec.policy.options) == ("ngram_simple", "fixed", {"gamma": 3})
    for flag in ("-md", "--model-draft", "--draft"):
        spec = arguments.method_of(parsed(name, flag, "d.gguf"), params)
        assert (spec.drafter.name, spec.drafter.options) == ("model", {"model": "d.gguf"})
    assert parsed(name, "-hf", "owner/repo:Q4_K_M").model == "hf://owner/repo:Q4_K_M"


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_prompt_and_tokens(name):
    args = parsed(name, "-m", "a.gguf", "-p", "Once upon a time", "-n", "32")
    assert (args.model, args.prompt, arguments.sampling_params(args).max_tokens) == ("a.gguf", "Once upon a time", 32)
    for argv in (["-m", "a.gguf", "hi"], ["hi", "--temp", "0", "-m", "a.gguf"], ["a.gguf", "-p", "hi"]):
        args = parsed(name, *argv)
        assert (args.model, args.prompt) == ("a.gguf", "hi")
    assert parsed("generate", "--n", "2").n == 2


def test_an_option_between_model_and_prompt_takes_nothing_away():
    args = parsed("generate", "m.gguf", "--policy", "auto_off", "hi", "--gamma", "3")
    assert (args.model, args.prompt) == ("m.gguf", "hi")
    spec = arguments.method_of(args, SamplingParams(temperature=0.0))
    assert spec.policy.name == "auto_off" and spec.policy.options == {"gamma": 3}


def test_a_flag_of_several_letters_is_no_short_one_with_a_value():
    with pytest.raises(UserError, match=r"^unknown argument -nix \("):
        parsed("generate", "-m", "a.gguf", "-nix", "99", "-p", "hi")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("-ngl", "a device holds all layers"),
        ("--num-beams", "best_of"),
        ("--no-mmap", "read once"),
        ("--rope-freq-base", "to the model"),
        ("-ctk", "--kv-dtype"),
        ("-sys", "--system TEXT"),
    ],
)
def test_what_we_do_not_have_is_answered(flag, said):
    with pytest.raises(UserError, match=f"^unknown argument {flag}; .*{said}"):
        parsed("generate", "-m", "a.gguf", flag, "9", "-p", "hi")


def test_a_flag_that_is_not_near_gets_no_name():
    for flag in ("--ngram", "--mmap"):
        with pytest.raises(UserError, match=rf"^unknown argument {flag} \("):
            parsed("generate", "-m", "a.gguf", "-p", "hi", flag, "3")


@pytest.mark.parametrize("name", ["generate", "serve"])
def test_words_of_vllm_and_hugging_face(name):
    args = parsed(name, "--max-model-len", "512", "--tensor-parallel-size", "2", "--kv-cache-dtype", "f16",
                  "--repeat-penalty", "1.1", "--max-new-tokens", "9", "--draft-min", "2")  # fmt: skip
    loaded = {"context_length": 512, "mesh": 2, "kv_dtype": "f16", "threads": None, "backend": None}
    assert arguments.load_options(args) == loaded and args.option == ["n_min=2"]
    params = arguments.sampling_params(args)
    assert (params.repetition_penalty, params.max_tokens) == (1.1, 9)
    config = '{"method": "ngram", "num_speculative_tokens": 4, "rejection_sample_method": "block"}'
    spec = arguments.method_of(parsed(name, "--speculative-config", config), params)
    assert (spec.drafter.name, spec.drafter.options) == ("prompt_lookup", {"num_speculative_tokens": 4})
    assert spec.verifier.name == "block"
    spec = arguments.method_of(parsed(name, "--assistant-model", "d.gguf", "--num-assistant-tokens", "3"), params)
    assert spec.drafter.options == {"model": "d.gguf"} and spec.policy.options == {"gamma": 3}
    with pytest.raises(UserError, match="give one of the methods"):
        parsed(name, "--speculative-config", '{"method": "medusa"}')


def test_a_server_has_no_prompt():
    for argv in (["-p", "hi"], ["-n", "4"], ["-m", "a.gguf", "b.gguf"]):
        with pytest.raises(UserError, match="unknown argument"):
            parsed("serve", *argv)


def test_llama_bench():
    args = parsed("bench", *MODEL, "-p", "64", "-n", "8")
    assert (args.bench, args.model, args.pp, args.tg) == ("speed", "a.gguf", 64, 8)
    assert arguments.load_options(args) == LOADED
    args = parsed(
        "bench", "batch", "1,2", *MODEL, "-p", "64", "-n", "8", "-md", "d.gguf", "--draft-max", "2,4", *SAMPLING
    )
    assert (args.pp, args.tg, args.drafter, args.drafted, args.top_k) == (64, 8, "d.gguf", (2, 4), 40)
    for argv in (["suffix"], ["--spec-type", "suffix"], ["-md", "suffix"], ["--drafter", "suffix"]):
        assert parsed("bench", "draft", *argv, *MODEL).drafter == "suffix"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["-md", "d.gguf", "--spec-type", "ngram-simple"], "two drafters"),
        (["--drafter", "none", "--gamma", "3"], "^--gamma needs --drafter"),
        (["--drafter", "none", "--option", "ngram_max=3"], "^--option ngram_max needs --drafter"),
        (["--option", "gamma=4", "--gamma", "3"], "^--gamma and --option gamma are one thing"),
        (["--option", "policy.gamma=4", "--gamma", "3"], r"^--gamma and --option policy\.gamma are one thing"),
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}', "--gamma", "3"],
            "^--gamma and num_speculative_tokens of --speculative-config are one thing",
        ),
        (["--speculative-config", '{"method": "ngram"}', "--drafter", "suffix"], "^--speculative-config names the"),
        (
            [
                "--speculative-config",
                '{"method": "ngram", "rejection_sample_method": "block"}',
                "--verifier",
                "token",
            ],
            "one thing",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(argv, said):
    with pytest.raises(UserError, match=said):
        arguments.method_of(parsed("generate", *argv), SamplingParams(temperature=0.0))


def test_the_draft_file_is_that_of_the_drafter_which_is_named():
    spec = arguments.method_of(parsed("serve", "-md", "h.gguf", "--spec-type", "draft-eagle3"), SamplingParams())
    assert (spec.drafter.name, spec.drafter.options) == ("eagle3", {"path": "h.gguf"})


@pytest.mark.parametrize(("flag", "said"), [("--foo", r"^unknown argument --foo \("), ("--ngl", "all layers")])
def test_a_flag_is_told_of_what_is_near(flag, said):
    with pytest.raises(UserError, match=said):
        parsed("generate", flag, "3")
