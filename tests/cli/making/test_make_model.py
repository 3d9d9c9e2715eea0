"""`headrace make-model`: the bytes are fixed, the shapes are the public ones, and other programs load the result."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models

from headrace.cli import main
from headrace.compress.gguf_vocabulary import vocabulary
from headrace.errors import HeadraceError, RequestError
from headrace.models.model_folder import open_model
from headrace.models.synthetic import random_model
from headrace.models.synthetic.public_shapes import SHAPE_NAMES, ShapeName, find_shape
from headrace.models.synthetic.random_model import Dtype, tensors_of, write_random_model
from headrace.models.synthetic.synthetic_tokenizer import byte_alphabet, tokenizer_json

TEXT = """The first thing that most people notice about the old mill is how quiet it has become. For more than two
hundred years the river turned its great wheel, and the farmers of the valley brought their grain here every
autumn. My grandmother remembered standing by the bridge as a child, watching the water rush through the
narrow channel while her father argued about prices with the owner. Today the machinery is silent, but
volunteers have restored the building, and on certain weekends in summer they open the gates again so that
visitors can see how the power of a small stream was once enough."""
ODD_TEXT = 'def f(x):\n    return x + 1  # "yes"\n\n\tprint(1234567, "née", "日本", "🙂")\r\n  '

# Parameter counts that the public models state (weights that are tied count once).
PUBLIC_WEIGHTS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_248_023_552,
    "minilm-l6": 22_713_216,
}

PUBLIC_TOKENS = {
    "qwen2.5-0.5b": {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|file_sep|>": 151664},
    "qwen3-0.6b": {"<tool_call>": 151657, "<tool_response>": 151665, "<think>": 151667, "</think>": 151668},
    "llama-3.2-1b": {"<|begin_of_text|>": 128000, "<|eot_id|>": 128009, "<|reserved_special_token_247|>": 128255},
    "mistral-7b": {"<unk>": 0, "<s>": 1, "</s>": 2, "[INST]": 3, "[TOOL_RESULTS]": 8, "[control_768]": 770},
    "minilm-l6": {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103, "[unused993]": 998},
}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def made(tmp_path: Path, name: str, **options: Any) -> Path:
    out = tmp_path / name
    write_random_model(name, out, **options)
    return out


def tokenizer_of(name: ShapeName) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_json(find_shape(name))))


def test_the_bytes_of_a_model_are_fixed_for_ever(tmp_path: Path) -> None:
    out = made(tmp_path, "tiny")
    assert digest(out / "model.safetensors") == "9150cae28754bd6e2eadc2118c9bc91174ddd6cf5f4cadc97b6a69f95c4f506b"
    assert digest(out / "tokenizer.json") == "97abacf9d9eaff8a0fa290b5805fd3b7eea77a4bd8e26c95bac6fb2a51d26715"


def test_another_seed_changes_the_weights_and_nothing_else(tmp_path: Path) -> None:
    zero = content(made(tmp_path / "zero", "mixtral-tiny"))
    one = content(made(tmp_path / "one", "mixtral-tiny", seed=1))
    assert {file for file in zero if zero[file] != one[file]} == {"model.safetensors"}


def test_weights_do_not_depend_on_how_they_are_split_into_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_file(made(tmp_path / "whole", "qwen3-moe-tiny", dtype="f32") / "model.safetensors")
    monkeypatch.setattr(random_model, "SHARD_BYTES", 3_000_000)
    monkeypatch.setattr(random_model, "CHUNK_WEIGHTS", 1 << 12)
    split = made(tmp_path / "split", "qwen3-moe-tiny", dtype="f32")
    index = json.loads((split / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{number:05}-of-00004.safetensors" for number in range(1, 5)]
    assert not (split / "model.safetensors").exists()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in whole.values())
    for file in files:
        for name, array in load_file(split / file).items():
            assert index["weight_map"][name] == file
            assert array.tobytes() == whole.pop(name).tobytes()
    assert not whole


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("f16", 2), ("f32", 4)])
def test_weights_are_stored_in_the_type_that_was_asked_for(tmp_path: Path, dtype: Dtype, size: int) -> None:
    made_model = write_random_model("tiny", tmp_path / "out", dtype=dtype)
    assert made_model.weight_bytes == made_model.weights * size
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[dtype]


def test_weights_are_normal_with_the_spread_that_keeps_activations_sane(tmp_path: Path) -> None:
    arrays = load_file(made(tmp_path, "tiny", dtype="f32") / "model.safetensors")
    query = arrays["model.layers.0.self_attn.q_proj.weight"]
    assert query.shape == (128, 128)
    assert abs(query.mean()) < 0.002
    assert query.std() == pytest.approx(128**-0.5, rel=0.02)
    assert (arrays["model.norm.weight"] == 1).all()


@pytest.mark.parametrize("name", PUBLIC_WEIGHTS)
def test_a_shape_has_as_many_weights_as_the_public_model(name: ShapeName) -> None:
    assert sum(tensor.weights for tensor in tensors_of(find_shape(name)).values()) == PUBLIC_WEIGHTS[name]


@pytest.mark.parametrize("name", PUBLIC_TOKENS)
def test_special_tokens_have_the_public_ids_and_survive_encoding(name: ShapeName) -> None:
    tokenizer = tokenizer_of(name)
    for text, token in PUBLIC_TOKENS[name].items():
        assert tokenizer.token_to_id(text) == token
        assert tokenizer.encode(f"{text}", add_special_tokens=False).ids == [token]


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_a_tokenizer_has_the_right_size_and_shortens_english(name: ShapeName) -> None:
    tokenizer = tokenizer_of(name)
    assert tokenizer.get_vocab_size() == find_shape(name).vocab_size
    assert {tokenizer.id_to_token(token) is None for token in range(tokenizer.get_vocab_size())} == {False}
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert 3.0 < len(TEXT) / len(ids) < 4.5
    if not find_shape(name).lower_case:
        assert tokenizer.decode(ids) == TEXT
        assert tokenizer.decode(tokenizer.encode(ODD_TEXT, add_special_tokens=False).ids) == ODD_TEXT


@pytest.mark.parametrize("name", ["tiny", "mistral-7b"])
def test_every_ordinary_token_is_what_bpe_makes_of_its_text(name: ShapeName) -> None:
    shape = find_shape(name)
    model = tokenizer_json(shape)["model"]
    bpe = Tokenizer(models.BPE(vocab=model["vocab"], merges=model["merges"]))
    ordinary = {token: text for text, token in model["vocab"].items() if text not in shape.tokens}
    assert [encoded.ids for encoded in bpe.encode_batch(list(ordinary.values()))] == [[token] for token in ordinary]

    # And the same when the text comes whole, through the normaliser and the word pattern.
    values = {letter: value for value, letter in enumerate(byte_alphabet())}
    spelled = {token: bytes(values[letter] for letter in text) for token, text in ordinary.items()}
    texts = {token: raw.decode() for token, raw in spelled.items() if raw.isascii()}
    encoded = tokenizer_of(name).encode_batch(list(texts.values()), add_special_tokens=False)
    assert [one.ids for one in encoded] == [[token] for token in texts]


@pytest.mark.parametrize("name", ["tiny", "mixtral-tiny", "qwen3-moe-tiny", "minilm-l6"])
def test_transformers_loads_every_weight_and_the_tokenizer(tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = made(tmp_path, name)
    auto = transformers.AutoModel if name == "minilm-l6" else transformers.AutoModelForCausalLM
    model, report = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert len(tokenizer) == ours.get_vocab_size()
    assert tokenizer(TEXT)["input_ids"] == ours.encode(TEXT).ids
    with torch.no_grad():
        output = model(torch.tensor([ours.encode(TEXT).ids]))
    values = output.last_hidden_state if name == "minilm-l6" else output.logits
    spread = 1.0 if name == "minilm-l6" else random_model.LOGIT_SPREAD
    assert values.std().item() == pytest.approx(spread, rel=0.1)


def chat(name: ShapeName, tmp_path: Path, messages: list[dict[str, Any]], **options: Any) -> str:
    """The chat as transformers renders it from what we wrote."""
    transformers = pytest.importorskip("transformers")
    shape = find_shape(name)
    random_model.write_settings(tmp_path, shape, "bf16")
    return transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False, **options)


def test_a_chat_template_writes_turns(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    assert chat("tiny", tmp_path, messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_chat_template_has_the_marks_of_its_model(tmp_path: Path) -> None:
    assert chat("llama-3.2-1b", tmp_path, [{"role": "user", "content": "Hi"}]) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    )


def test_a_chat_template_writes_tools_and_their_calls(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    calls = [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}},
    ]
    messages = [
        {"role": "user", "content": "1 and 2"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "3"},
    ]
    text = chat("tiny", tmp_path, messages, tools=tools)
    assert '\n{"type": "function", "function": {"name": "add", "parameters": {}}}\n' in text
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n<|im_start|>tool\n3<|im_end|>\n'
    )


@pytest.mark.parametrize("name", ["tiny", "mixtral-tiny", "qwen3-moe-tiny"])
def test_gguf_has_a_name_for_the_tokenizer(tmp_path: Path, name: ShapeName) -> None:
    keys = vocabulary(open_model(made(tmp_path, name)))
    assert keys["tokenizer.ggml.pre"] == "smaug-bpe"
    tokens = cast("list[str]", keys["tokenizer.ggml.tokens"])
    assert len(tokens) == find_shape(name).vocab_size
    assert not [each for each in tokens if each.startswith("[PAD")]


def test_generation_ends_at_the_public_ids(tmp_path: Path) -> None:
    ends = {"tiny": [4093, 4091], "qwen2.5-0.5b": [151645, 151643], "llama-3.2-1b": [128009, 128001, 128008]}
    for name in ("tiny", "qwen2.5-0.5b", "llama-3.2-1b"):
        random_model.write_settings(tmp_path, find_shape(name), "bf16")
        assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == ends[name]


def test_an_encoder_says_how_it_is_pooled(tmp_path: Path) -> None:
    out = made(tmp_path, "minilm-l6")
    pooling = json.loads((out / "1_Pooling" / "config.json").read_text())
    assert [key for key, value in pooling.items() if value is True] == ["pooling_mode_mean_tokens"]
    assert [module["path"] for module in json.loads((out / "modules.json").read_text())] == [
        "",
        "1_Pooling",
        "2_Normalize",
    ]


def test_too_small_a_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**12, free=10_000_000_000))
    with pytest.raises(HeadraceError, match=r"mistral-7b takes 14\.5 GB, but only 10\.0 GB are free"):
        write_random_model("mistral-7b", tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_model_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> int:
        raise OSError("No space left on device")

    monkeypatch.setattr(random_model, "write_weights", fail)
    with pytest.raises(OSError, match="No space left"):
        write_random_model("tiny", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_random_model("tiny", tmp_path / "out")  # an empty directory is fine
    before = content(tmp_path)
    with pytest.raises(RequestError, match="is not an empty directory"):
        write_random_model("tiny", tmp_path / "out", seed=1)
    assert content(tmp_path) == before


@pytest.mark.parametrize(("name", "seed", "parameter"), [("gpt-5", 0, "like"), ("tiny", -1, "seed")])
def test_a_wrong_request_names_its_parameter(tmp_path: Path, name: str, seed: int, parameter: str) -> None:
    with pytest.raises(RequestError) as caught:
        write_random_model(name, tmp_path / "out", seed=seed)
    assert caught.value.parameter == parameter


def test_the_command_makes_the_model_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make-model", "--like", "tiny", str(tmp_path / "out")]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(
        f"{tmp_path}/out: 1.7 million random weights in the shape of tiny, 3.4 MB of bf16 in one file"
    )
    assert output.err == ""
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 3_400_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["make-model", "--like", "gpt-5", "out"], 'Invalid value "gpt-5" for --like'),
        (["make-model", "--like", "tiny"], "needs OUT"),
        (["make-model", "--like", "tiny", "--speed", "9", "out"], "Unknown option: --speed"),
        (["make-model", "--like", "tiny", "FULL"], "is not an empty directory"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "file").touch()
    assert main([str(tmp_path) if argument == "FULL" else argument for argument in arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("headrace: ")
    assert message in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OSError(28, "No space left on device"), 1, "headrace: [Errno 28] No space left on device\n"),
        (MemoryError(), 1, "headrace: Not enough memory.\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_failure_has_its_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    line: str,
) -> None:
    def fail(*arguments: object) -> int:
        raise error

    monkeypatch.setattr(random_model, "write_weights", fail)
    assert main(["make-model", "--like", "tiny", str(tmp_path / "out")]) == code
    assert capsys.readouterr().err == line


def test_help_loads_no_command_and_no_numpy() -> None:
    script = "\n".join(
        (
            "import sys",
            "from headrace.cli import main",
            "assert main(['--help']) == 0",
            "heavy = {'numpy', 'tokenizers', 'jinja2', 'headrace._core', 'headrace.cli.making.make_model'}",
            "print('loaded:', sorted(heavy & set(sys.modules)))",
        )
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "make-model" in done.stdout
    assert done.stdout.endswith("loaded: []\n")
