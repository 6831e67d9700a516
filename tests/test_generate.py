"""python -m jaxllm.generate: its flags, what it writes where, and how it fails."""

import io
import os
import signal
import subprocess
import sys
import time

import pytest

from jaxllm import generate
from jaxllm.outputs import CompletionOutput, RequestOutput

SMALL = ["--max-model-len=128", "--max-num-batched-tokens=128"]
SMALL += ["--compilation-cache-dir=", "--enforce-eager"]


def parse(*argv: str):
    return generate.make_parser().parse(argv)


def growing(*texts: str) -> list[RequestOutput]:
    """Outputs as the engine streams them: all so far, a token more each time."""
    return [
        RequestOutput(
            request_id="0",
            prompt="p",
            prompt_token_ids=[1, 2, 3],
            outputs=[CompletionOutput(index=0, text=text, token_ids=list(range(count)))],
            finished=count == len(texts),
        )
        for count, text in enumerate(texts, start=1)
    ]


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_sampling_flags_reach_sampling_params():
    args = parse("--temperature", "0.5", "--top_k", "7", "--stop", "a", "--stop", "b")
    params = generate.sampling_params(args)
    assert (params.temperature, params.top_k, params.stop_strings) == (0.5, 7, ("a", "b"))
    assert generate.sampling_params(parse()).greedy


def test_one_request_at_a_time_unless_asked_otherwise():
    assert generate.engine_config(parse()).max_num_seqs == 1
    assert generate.engine_config(parse("--max-num-seqs", "4")).max_num_seqs == 4


def test_prompt_comes_from_the_flag_or_from_a_pipe():
    assert generate.read_prompt(parse("--prompt", "x"), io.StringIO("y")) == "x"
    assert generate.read_prompt(parse(), io.StringIO("from a pipe\n")) == "from a pipe\n"


@pytest.mark.parametrize(
    ("argv", "stdin", "complaint"),
    [
        ([], FakeTerminal(), "--prompt is missing"),
        ([], io.StringIO(""), "the prompt is empty"),
        (["--prompt", "x", "--system", "s"], FakeTerminal(), "--system needs --chat"),
    ],
)
def test_prompt_that_makes_no_sense_is_refused(argv, stdin, complaint):
    with pytest.raises(ValueError, match=complaint):
        generate.read_prompt(parse(*argv), stdin)


def test_messages_start_with_the_system_message():
    roles = [message["role"] for message in generate.as_messages("q", "s")]
    assert roles == ["system", "user"]
    assert generate.as_messages("q", None) == [{"role": "user", "content": "q"}]


def test_answer_is_written_as_it_grows():
    stdout, timing = io.StringIO(), generate.Timing(asked=time.perf_counter())
    last = generate.write_answer(iter(growing("Pa", "Pa", "Paris")), timing, stdout)
    assert stdout.getvalue() == "Paris\n"
    assert last is not None
    assert timing.first is not None
    assert timing.last is not None
    assert timing.asked <= timing.first <= timing.last


def test_rate_counts_the_tokens_after_the_first():
    timing = generate.Timing(asked=0.0, first=2.0, last=4.0)
    assert timing.tokens_per_second(11) == pytest.approx(5.0)
    assert timing.tokens_per_second(1) == pytest.approx(0.25)
    assert generate.Timing(asked=0.0).tokens_per_second(0) == 0.0


def test_summary_says_when_the_answer_was_cut():
    (output,) = growing("x")
    timing = generate.Timing(asked=0.0, first=0.5, last=0.5)
    assert generate.summary(output, timing) == (
        "1 tokens, 2.0 tokens/s, first token after 0.50 s (prompt of 3 tokens)"
    )
    output.outputs[0].finish_reason = "length"
    assert "cut at --max-tokens" in generate.summary(output, timing)


def errors_of(capsys, *argv: str) -> str:
    assert generate.main(argv) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_bad_value_is_one_line_and_exit_code_1(capsys):
    error = errors_of(capsys, "--prompt", "x", "--top-p", "3")
    assert error == "python -m jaxllm.generate: top_p must be in (0, 1], got 3.0.\n"
    error = errors_of(capsys, "--prompt", "x", "--block-size", "7")
    assert error.startswith("python -m jaxllm.generate: --block-size must be a power of two")


def test_missing_model_is_one_line_and_exit_code_1(capsys, tmp_path):
    error = errors_of(capsys, "--quiet", "--prompt", "x", "--model", str(tmp_path / "nowhere"))
    assert error.count("\n") == 1
    assert "nowhere" in error


def test_unknown_flag_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as stop:
        generate.main(["--promt", "x"])
    assert stop.value.code == 2
    assert "--prompt" in capsys.readouterr().err


def test_demo_model_answers_the_question(capsys):
    question = ["--prompt", "What is the capital of France?", "--chat", "--max-tokens", "20"]
    assert generate.main([*question, *SMALL]) == 0
    captured = capsys.readouterr()
    assert "Paris" in captured.out
    assert "tokens/s, first token after" in captured.err


def test_ctrl_c_ends_it_cleanly():
    command = [sys.executable, "-m", "jaxllm.generate", "--prompt", "1, 2,", "--ignore-eos"]
    environment = {**os.environ, "XLA_FLAGS": ""}
    with subprocess.Popen(
        [*command, "--max-tokens", "100", *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)  # it is answering
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.endswith("Stopped.\n")
    assert "Traceback" not in errors
