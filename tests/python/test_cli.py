"""The command line: exit statuses, one-line errors, JSON."""

import json
import subprocess
import sys

import pytest

import pagedkv
from pagedkv.cli import main
from trace_data import make_mooncake, write_jsonl

KEYS = ["requests", "prompt_tokens", "output_tokens", "hit_tokens", "evictions", "rejected", "preemptions",
        "peak_blocks", "utilization", "manager_ns_per_step", "contiguous", "paged"]


def run(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_error(capsys, *arguments):
    """The one line of a command that fails."""
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("pagedkv: error: ") and err.count("\n") == 1 and err.endswith("\n")
    return err


@pytest.fixture
def trace(tmp_path):
    return write_jsonl(tmp_path / "trace.jsonl", [make_mooncake(1200 + i, 3, 100 * i, 2) for i in range(1, 5)])


# ---- errors


@pytest.mark.parametrize("arguments, message", [
    ([], "COMMAND"),
    (["frobnicate"], "frobnicate"),
    (["plan"], "plan"),
    (["replay", "--frobnicate"], "--frobnicate"),
    (["replay", "a", "b"], "b"),
    (["replay", "--concurrency", "0"], "--concurrency"),
    (["replay", "--concurrency", "x"], "'x'"),
    (["replay", "--block-size", "-1"], "--block-size"),
    (["replay", "--block-size", "65537", "--requests", "3"], "65537"),
    (["replay", "--num-blocks", "1.5"], "--num-blocks"),
    (["replay", "--num-blocks", "9" * 30], "--num-blocks"),
    (["replay", "--num-blocks", "5", "--memory", "1GiB"], "--memory"),
    (["replay", "--memory", "lots", "--requests", "3"], "lots"),
    (["replay", "--memory", "-1", "--requests", "3"], "-1"),
    (["replay", "--eviction", "random"], "random"),
    (["replay", "--dtype", "float64"], "float64"),
    (["replay", "--head-dim", "12", "--requests", "3"], "12"),
    (["replay", "--workload", "batch"], "batch"),
    (["replay", "--seed", "-1"], "--seed"),
    (["replay", "--num-heads", "4"], "--num-heads"),
    (["replay", "--attend", "--num-kv-heads", "2", "--num-heads", "3"], "--num-heads 3"),
    (["replay", "--attend", "--device", "cuda"], "--attend"),
    (["replay", "--device", "tpu", "--requests", "3"], "tpu"),
    (["replay", "/nowhere/trace.jsonl"], "/nowhere/trace.jsonl: No such file"),
    (["replay", "/"], "/: Is a directory"),
    (["replay", "--json", "/nowhere/result.json"], "/nowhere/result.json"),
    (["replay", "--json", "/"], "is a directory"),
    (["info", "--frobnicate"], "--frobnicate"),
    (["info", "--json", "/nowhere/info.json"], "/nowhere/info.json"),
])
def test_error_is_one_line_and_status_2(capsys, arguments, message):
    assert message in run_error(capsys, *arguments)


def test_malformed_line_is_named(capsys, trace):
    with trace.open("a") as file:
        file.write('{"timestamp": 3, "input_length": 12')
    assert f"pagedkv: error: {trace}:5: not valid JSON" in run_error(capsys, "replay", trace)
    assert run(capsys, "replay", trace, "--limit", 4)[0] == 0


def test_options_of_the_workload_are_refused_for_a_trace(capsys, trace):
    assert "--limit" in run_error(capsys, "replay", trace, "--requests", 2)
    assert "--workload" in run_error(capsys, "replay", trace, "--workload", "chat")


def test_pool_larger_than_memory(capsys):
    assert "memory" in run_error(capsys, "replay", "--requests", 3, "--memory", "100000TiB").lower()


def test_interrupt_is_quiet(capsys, monkeypatch, trace):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pagedkv.cli.replay.Replay.run", interrupt)
    assert run(capsys, "replay", trace) == (130, "", "")


@pytest.mark.parametrize("arguments", [["--help"], ["replay", "--help"], ["info", "--help"], ["--version"]])
def test_help_and_version(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert pagedkv.version() in out if arguments == ["--version"] else "--" in out


# ---- output


def test_replay_json_file_and_table(capsys, tmp_path, trace):
    path = tmp_path / "result.json"
    status, out, err = run(capsys, "replay", trace, "--json", path)
    assert (status, err) == (0, "")
    result = json.loads(path.read_text())
    assert list(result)[: len(KEYS)] == KEYS
    assert set(result["contiguous"]) >= {"max_concurrency", "utilization"}
    assert set(result["paged"]) == {"max_concurrency", "utilization"}
    assert result["requests"] == 4 and result["prompt_tokens"] == sum(1200 + i for i in range(1, 5))
    assert result["paged"]["utilization"] == result["utilization"]
    for word in ("requests", "prefix hits", "evictions", "rejected", "preemptions", "peak blocks", "utilization",
                 "manager per step", "manager per token", "contiguous", "waste", f"{result['prompt_tokens']:,}"):
        assert word in out


def test_json_to_standard_output_is_alone_there(capsys, trace):
    status, out, err = run(capsys, "replay", trace, "--json", "-")
    assert (status, err) == (0, "")
    assert json.loads(out)["requests"] == 4


def test_info(capsys):
    status, out, err = run(capsys, "info")
    assert (status, err) == (0, "")
    assert pagedkv.version() in out and "cuda" in out and "host" in out
    status, out, err = run(capsys, "info", "--json", "-")
    result = json.loads(out)
    assert (status, err) == (0, "")
    assert result["version"] == pagedkv.version()
    assert result["devices"][0]["device"] == "host"
    assert result["cuda"]["is_usable"] or result["cuda"]["reason"]


def test_module_runs_as_a_program(trace):
    command = [sys.executable, "-m", "pagedkv", "replay", str(trace), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["requests"] == 4
    done = subprocess.run([*command[:-2], "--block-size", "x"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1


def test_closed_pipe_is_quiet(trace):
    command = f"{sys.executable} -m pagedkv replay {trace} | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def test_progress_only_on_a_terminal(capsys, monkeypatch):
    from pagedkv.cli import progress

    class Terminal:
        def __init__(self):
            self.text = ""

        def isatty(self):
            return True

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert progress.make_progress(10, "requests") is None
    terminal = Terminal()
    bar = progress.make_progress(10, "requests", terminal)
    bar.update(5)
    assert " 50 %" in terminal.text and "5 of 10 requests" in terminal.text
    bar.close()
