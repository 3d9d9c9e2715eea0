"""Every code block of every page runs, in the order of the page, from an empty folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.documentation import Example, ExampleError, Reader, check_output, read_examples
from tests.test_docs import PAGES, ROOT

EXAMPLES = {page: page.read_text(encoding="utf-8") for page in PAGES if "```" in page.read_text(encoding="utf-8")}
NAMES = [str(page.relative_to(ROOT)) for page in EXAMPLES]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("page", EXAMPLES, ids=NAMES)
def test_every_example_of_the_page_works(page: Path, tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        for example in read_examples(EXAMPLES[page]):
            reader.run(example)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("```\nheadrace serve\n```\n", "unknown language"),
        ("```ruby\nputs 1\n```\n", "unknown language"),
        ("```text\nx-header: 1\n```\n", "say in a comment what the block is"),
        ("```json\n{}\n```\n", "say in a comment what the block is"),
        ("<!-- example: not run: -->\n```sh\nmake\n```\n", "say why the block is not run"),
        ("<!-- example: sometimes -->\n```sh\nmake\n```\n", "unknown comment 'sometimes'"),
        ("<!-- example: output -->\n\nNo block.\n", "has no block"),
        ("<!-- example: output -->\n<!-- example: exit 2 -->\n```sh\nfalse\n```\n", "has no block"),
    ],
)
def test_a_block_must_say_how_it_runs(page: str, reason: str) -> None:
    with pytest.raises(ExampleError, match=reason):
        read_examples(page)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("```sh\nfalse\n```\n", "line 1: exit code 1, not 0"),
        ("\n<!-- example: exit 2 -->\n```sh\nexit 1\n```\n", "line 3: exit code 1, not 2"),
        ("```console\n$ echo one\ntwo\n```\n", "expected this line"),
        ("```sh\necho one\n```\n<!-- example: prints\ntwo\n-->\n", "expected this line"),
        ("```toml\n[servers]\nport = 1\n```\n", "exit code 2"),
        ("```python\nassert 1 == 2\n```\n", "AssertionError"),
        ("<!-- example: not run: a fragment -->\n```python\nfor\n```\n", "is not python"),
        ("<!-- example: not run: a fragment -->\n```json\n{'a': 1}\n```\n", "is not json"),
        ("""```sh\necho '{"error": {"message": "no"}}'\n```\n""", "the server rejects it"),
    ],
)
def test_a_block_that_does_not_do_what_the_page_says_fails(page: str, reason: str, tmp_path: Path) -> None:
    *before, last = read_examples(page)
    with Reader(tmp_path) as reader:
        for example in before:
            reader.run(example)
        with pytest.raises(ExampleError, match=reason):
            reader.run(last)


def test_variables_files_and_programs_carry_over_to_later_blocks(tmp_path: Path) -> None:
    page = """
```sh
name=$(echo value)
```

<!-- example: file folder.txt -->
```text
one
```

```python
count = 2
```

<!-- example: continues -->
```python
print(open("folder.txt").read(), count)
```

<!-- example: output -->
```text
one
2
```

```console
$ echo "$name" && \\
    cat folder.txt
value
one
$ echo 12 ms
12 ms
```

<!-- example: output, numbers vary -->
```text
7.5 ms
```
"""
    with Reader(tmp_path) as reader:
        for example in read_examples(page):
            reader.run(example)


@pytest.mark.parametrize(
    ("expected", "found", "fits"),
    [
        ('{"a": "x..."}', '{"a": "xyz", "b": 1}', True),
        ('{"a": [1, 2]}', '{"a": [1, 2, 3]}', False),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": null}', "{}", False),
        ('{"a": 1}', "no object", False),
    ],
)
def test_json_output_has_the_shown_fields(expected: str, found: str, fits: bool) -> None:
    example = Example(1, "json", expected, "output")
    if fits:
        check_output(example, found)
    else:
        with pytest.raises(ExampleError):
            check_output(example, found)
