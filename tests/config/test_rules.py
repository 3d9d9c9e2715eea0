"""What must hold between keys: every break of a rule is told, with its place, what was expected and what was found."""

from __future__ import annotations

import pytest

from tests.support.config_text import mistakes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[models]", "models: expected at least one model"),
        ("default_model = 'x'", 'default_model: expected one of the models, "mini", found "x"'),
        ("[models.'a@b']", 'models."a@b": expected a model name'),
        ("models.mini.aliases = ['a', 'a']", 'models.mini.aliases[1]: "a" is already an alias of "mini"'),
        ("models.a.aliases = ['b']\nmodels.b = {}", 'models.a.aliases[0]: "b" is already the model "b"'),
        (
            "models.a = {aliases = ['a@x'], variants.x = {}}",
            'models.a.aliases[0]: "a@x" is already a variant of the model "a"',
        ),
        ("models.a.aliases = ['a b']", "models.a.aliases[0]: expected a name"),
        ("models.a.variants.'x y' = {}", 'models.a.variants."x y": expected a name'),
        ("models.a.surface = 'phone'", 'models.a.surface: unknown surface "phone"; known surfaces: chat, voice'),
        ("surfaces.phone = {}", 'surfaces.phone: unknown surface "phone"'),
        ("models.a.options.weights = 'int5'", "models.a.options.weights: Unknown precision 'int5'"),
        ("models.a.variants.x.kv = 'f8'", "models.a.variants.x.kv: Unknown KV type 'f8'"),
        ("models.a.options.speculation = 'x'", "models.a.options.speculation: 'speculation' must be one of"),
        ("models.a.options.batch_mode = 'x'", "models.a.options.batch_mode: 'batch_mode' must be one of"),
        ("models.a = {options.kv = 'f8', variants.x = {}}", "models.a.options.kv: Unknown KV type 'f8'"),
        ("models.a.options.max_rows = 0", "models.a.options.max_rows: 'max_rows' must be at least 1, not 0"),
        ("keys = [{name='a', key='x'}, {name='a', key='y'}]", 'keys[1].name: duplicate name "a": keys[0] has it too'),
        ("keys = [{name='a', key='x'}, {name='b', key='x'}]", "keys[1]: duplicate secret: keys[0] has the same one"),
        ("keys = [{name='a'}]", "keys[0]: expected exactly one of key, key_env and key_sha256, found none"),
        (
            "keys = [{name='a', key='x', key_env='X'}]",
            "keys[0]: expected exactly one of key, key_env and key_sha256, found key and key_env",
        ),
        ("keys = [{name='a', key_env='X'}]", "keys[0].key_env: the environment variable X is not set or empty"),
        ("keys = [{name='a', key_sha256='12'}]", "keys[0].key_sha256: expected 64 hexadecimal digits"),
        ("keys = [{name='a', key='x y'}]", "keys[0].key: expected ASCII characters without spaces"),
        ("keys = [{name='a', key='***'}]", 'keys[0].key: expected a secret, found the placeholder "***"'),
        ("keys = [{name='a', key='x', surface='s'}]", 'keys[0].surface: unknown surface "s"'),
        (
            "storage.files_bytes = 5\nstorage.file_bytes = 6",
            "storage.files_bytes: expected at least storage.file_bytes (6), found 5",
        ),
        ("models.a.autoscale = {least = 3, most = 2}", "models.a.autoscale.most: expected at least least (3), found 2"),
        (
            "models.a = {replicas = 5, autoscale = {most = 4}}",
            "models.a.replicas: expected a number from least to most of models.a.autoscale, found 5",
        ),
        (
            "models.a.autoscale.most_price = 3.0",
            "models.a.autoscale.replica_price: expected the price of a replica, because most_price is set",
        ),
        (
            "models.a.autoscale = {}\nserver.processes = 2",
            "models.a.autoscale: this needs server.processes = 1",
        ),
        (
            "models.a.workers = ['http://h:1']",
            "models.a.workers[0]: expected an address such as tls://10.0.0.5:9000",
        ),
        ("models.a.workers = ['tcp://h:1']", "models.a.workers[0]: expected tls:// for a worker on another machine"),
        (
            "models.a.workers = ['tcp://127.0.0.1:1', 'tcp://127.0.0.1:1']",
            "models.a.workers[1]: this address is already in the list",
        ),
        (
            "models.a.workers = ['tls://h:1']\nworkers = {cert_file = 'c', key_file = 'k'}",
            "workers.ca_file: missing: models.a.workers[0] needs TLS",
        ),
        (
            "models.a = {workers = ['tcp://127.0.0.1:1'], upstream.url = 'http://h/v1'}",
            "models.a.workers: expected no workers: an upstream serves this model",
        ),
        ("server.cors_origins = ['https://a.example/']", "server.cors_origins[0]: expected"),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, said: str) -> None:
    (mistake,) = mistakes(text)
    assert mistake.startswith(f"headrace.toml: {said}")


URL = "url = 'http://127.0.0.1:1/v1'"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f"models.a = {{variants.x = {{}}, upstreams.x.{URL}}}",
            "models.a.upstreams.x: the model already has a variant with this name",
        ),
        (f"models.a.upstreams.'x y'.{URL}", 'models.a.upstreams."x y": expected a name of letters, digits and . _ -'),
        (
            f"models.a = {{aliases = ['a@x'], upstreams.x.{URL}}}",
            'models.a.aliases[0]: "a@x" is already a variant of the model "a"',
        ),
        ("models.a.upstream.url = 'ftp://h'", "models.a.upstream.url: expected an http:// or https:// URL with a host"),
        ("models.'a.b'.upstreams.x.url = ''", 'models."a.b".upstreams.x.url: expected a non-empty string'),
        (
            "models.a.upstream = {url = 'http://h', breaker = {open_s = 90}}",
            "models.a.upstream.breaker.open_most_s: expected at least open_s (90), found 60",
        ),
        ("models.'a.b'.upstreams.x.url = 'x'", 'models."a.b".upstreams.x.url: expected an http:// or https:// URL'),
        (f"models.a.upstream = {{{URL}, key_env = 'K'}}", "models.a.upstream.key_env: the environment variable K is"),
        (f"models.a.upstream = {{{URL}, key = 'k', key_env = 'K'}}", "models.a.upstream: expected key or key_env"),
        (f"models.a.upstream = {{{URL}, headers.host = 'h'}}", "models.a.upstream.headers: host is set by the server"),
        (f"models.a.upstream = {{{URL}, takes.chat = false}}", "models.a.upstream.takes: expected at least one of"),
        (f"models.a.upstream = {{{URL}, health.path = 'up'}}", "models.a.upstream.health.path: expected a path that"),
    ],
)
def test_what_an_upstream_cannot_be_is_refused(text: str, said: str) -> None:
    (mistake,) = mistakes(text)
    assert mistake.startswith(f"headrace.toml: {said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tenants.other = {}", "tenants.other: expected up to 64 letters, digits and . _ -"),
        ("tenants.'a b' = {}", 'tenants."a b": expected up to 64'),
        ("tenants.a.models = ['maxi']", 'tenants.a.models: unknown model "maxi"; known models: "mini"'),
        ("tenants.a.surfaces = ['phone']", 'tenants.a.surfaces: unknown surface "phone"; known surfaces: "agent"'),
        ("tenants.a.profiles = ['slow']", 'tenants.a.profiles: unknown profile "slow"'),
        ("tenants.a.model_limits.maxi = {}", 'tenants.a.model_limits.maxi: unknown model "maxi"'),
        ("tenants.a.surface_limits.phone = {}", 'tenants.a.surface_limits.phone: unknown surface "phone"'),
        (
            "tenants.a.budgets = [{limit_micros = 1, period = 'day', then = 'mini@int4'}]",
            'tenants.a.budgets[0].then: unknown variant "mini@int4"; known variants: "mini"',
        ),
        (
            "tenants.a.budgets = [{limit_micros = 1, period = 'day'}, {limit_micros = 2, period = 'day'}]",
            "tenants.a.budgets[1]: duplicate budget",
        ),
        ("keys = [{name = 'a', key = 'x', models = ['maxi']}]", 'keys[0].models: unknown model "maxi"'),
        (
            "keys = [{name = 'a', key = 'x', surface = 'chat', surfaces = ['voice']}]",
            "keys[0].surface: expected one of the key's surfaces",
        ),
        ("fast.variant = '@int4'", 'fast.variant: unknown variant "@int4"; known variants: none'),
        ("fast.variant = 'maxi'", 'fast.variant: unknown variant "maxi"; known variants: "mini"'),
        ("fast.variants.maxi = 'mini'", 'fast.variants.maxi: unknown model "maxi"'),
        ("fast.variants.mini = 'maxi'", 'fast.variants.mini: unknown variant "maxi"'),
    ],
)
def test_what_tenants_and_keys_cannot_have_is_refused(text: str, said: str) -> None:
    (mistake,) = mistakes(text)
    assert mistake.startswith(f"headrace.toml: {said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prices.mini.input = 0.1234567", "prices.mini.input: expected at most six decimals, found '0.1234567'"),
        ("prices.mini.cached = 1e-7", "prices.mini.cached: expected at most six decimals, found '1e-07'"),
        ("prices.maxi = {}", 'prices.maxi: unknown model or variant "maxi"; known: "mini"'),
        ("prices.'mini@int4'.input = 1", 'prices."mini@int4": unknown model or variant "mini@int4"'),
        (
            "cache.semantic.mode = 'record'",
            'cache.semantic.embedder: expected a served encoder, one of "mini", found ""',
        ),
        (
            "cache.semantic = {mode = 'on', embedder = 'minilm'}",
            'cache.semantic.embedder: expected a served encoder, one of "mini", found "minilm"',
        ),
        ("cache.exact.bytes = 5", "cache.exact.tenant_bytes: expected at most cache.exact.bytes (5)"),
        ("shaping.summary_model = 'maxi'", 'shaping.summary_model: unknown model or variant "maxi"'),
        (
            "cache.results = {bytes = 5, tenant_bytes = 6}",
            "cache.results.tenant_bytes: expected at most cache.results.bytes (5), found 6",
        ),
        (
            "collections.embedder = 'minilm'",
            'collections.embedder: expected a served encoder, one of "mini", found "minilm"',
        ),
        (
            "collections.reranker = 'bge'",
            'collections.reranker: expected a served reranker, one of "mini", found "bge"',
        ),
    ],
)
def test_what_prices_caches_and_shaping_cannot_name_is_refused(text: str, said: str) -> None:
    (mistake,) = mistakes(text)
    assert mistake.startswith(f"headrace.toml: {said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("timezone = 'Middle/Earth'", 'timezone: unknown time zone "Middle/Earth"'),
        (
            "rules = [{name = 'a'}]",
            "rules[0]: expected exactly one of variant, split, cascade, chain, opening, found none",
        ),
        ("rules = [{name = 'a', variant = 'mini', chain = 'c'}]\nchains.c.steps = [{variant = 'mini'}]", "rules[0]: "),
        ("rules = [{name = 'a', split = 's'}]", 'rules[0].split: unknown split "s"; known splits: none'),
        (
            "rules = [{name = 'a', variant = 'maxi'}]",
            'rules[0].variant: unknown variant "maxi"; known variants: "mini"',
        ),
        (
            "rules = [{name = 'a', variant = 'mini'}, {name = 'a', variant = 'mini'}]",
            'rules[1].name: duplicate name "a": rules[0] has it too',
        ),
        (
            "rules = [{name = 'a', variant = 'mini', when.hours = ['9-5']}]",
            'rules[0].when.hours[0]: expected hours such as "22:00-06:00", found "9-5"',
        ),
        (
            "rules = [{name = 'a', variant = 'mini', when = {least_tokens = 5, most_tokens = 4}}]",
            "rules[0].when.most_tokens: expected at least least_tokens, 5, found 4",
        ),
        ("splits.s.percent = {mini = 99}", "splits.s.percent: expected shares that add up to 100 percent, found 99"),
        ("splits.s.percent = {}", "splits.s.percent: expected shares that add up to 100 percent, found 0"),
        ("splits.s.percent = {maxi = 100}", 'splits.s.percent.maxi: unknown variant "maxi"; known variants: "mini"'),
        (
            "splits.s.percent = {mini = 99.99999}",
            "splits.s.percent: expected shares in steps of 0.0001 percent, found 100",
        ),
        (
            "cascades.c = {small = 'mini', large = 'mini', threshold = 0.5}",
            "cascades.c.large: expected a variant other than",
        ),
        ("rewrites.none = {}", 'rewrites.none: expected a name other than "none"'),
        ("rewrites.a.variant = 'other'", 'rewrites.a.variant: unknown variant "other"'),
        ("rewrites.a.surfaces = ['chatt']", 'rewrites.a.surfaces[0]: unknown surface "chatt"'),
        (
            "rewrites.a.surfaces = ['chat']\nrewrites.b.surfaces = ['chat']",
            'rewrites.b.surfaces[0]: "chat" is rewritten by "a" already',
        ),
        ("chains.c.steps = []", "chains.c.steps: expected at least one step"),
        ("chains.c.steps = [{variant = 'x'}]", 'chains.c.steps[0].variant: unknown variant "x"'),
        ("hedges.maxi = {}", 'hedges.maxi: unknown variant "maxi"'),
        ("hedges.mini = {least_ms = 6000}", "hedges.mini.most_ms: expected at least least_ms, 6000, found 5000"),
        ("breaker = {open_s = 90}", "breaker.open_most_s: expected at least open_s (90), found 60"),
    ],
)
def test_routes_that_lead_nowhere_are_refused(text: str, said: str) -> None:
    (mistake,) = mistakes(f"[routing]\n{text}")
    assert mistake.startswith(f"headrace.toml: routing.{said}")


@pytest.mark.parametrize(
    ("threshold", "said"),
    [
        ("", ": expected exactly one of threshold and calibration, found none"),
        ("threshold = 0.5, calibration = 'x'", ": expected exactly one of threshold and calibration, found both"),
        ("calibration = 'x.jsonl'", ".calibration: x.jsonl: No such file or directory"),
    ],
)
def test_a_cascade_has_one_threshold(threshold: str, said: str) -> None:
    given = ", ".join(("small = 'mini@int4'", "large = 'mini'", *([threshold] if threshold else [])))
    (mistake,) = mistakes(f"models.mini.variants.int4 = {{}}\nrouting.cascades.c = {{{given}}}")
    assert mistake == f"headrace.toml: routing.cascades.c{said}"


@pytest.mark.parametrize(
    ("ladder", "said"),
    [
        ("preset = true, steps = [{step='trim', queue_ms=[2, 1]}]", ": expected either preset or steps, found both"),
        ("steps = [{step = 'trim'}]", ".steps[0]: expected a threshold for at least one of "),
        (
            "steps = [{step = 'trim', queue_ms = [200]}]",
            ".steps[0].queue_ms: expected two numbers (enter, leave), found 1",
        ),
        (
            "steps = [{step = 'trim', slack_ms = []}]",
            ".steps[0].slack_ms: expected two numbers (enter, leave), found 0",
        ),
        ("steps = [{step = 'trim', queue_ms = [100, 200]}]", ".steps[0].queue_ms: expected leave below enter, found "),
        ("steps = [{step = 'trim', slack_ms = [100, 100]}]", ".steps[0].slack_ms: expected leave above enter, found "),
        ("steps = [{step = 'trim', memory_free = [0.2, 0.1]}]", ".steps[0].memory_free: expected leave above enter"),
        ("steps = [{step = 'trim', budget_left = [0.2, 0.1]}]", ".steps[0].budget_left: expected leave above enter"),
        (
            "steps = [{step = 'stale', queue_ms = [2, 1]}, {step = 'trim', queue_ms = [2, 1]}]",
            ".steps[1].step: expected the order trim, max_tokens, variant, stale, extract, refuse, each once",
        ),
        (
            "steps = [{step = 'trim', queue_ms = [2, 1]}, {step = 'stale', queue_ms = [1.5, 1]}]",
            ".steps[1].queue_ms: expected thresholds that are not milder than those of the step before",
        ),
        (
            "steps = [{step='variant', queue_ms=[2, 1], variants=[]}]",
            ".steps[0].variants: expected at least one variant",
        ),
    ],
)
def test_a_ladder_that_cannot_be_climbed_is_refused_in_the_files_own_words(ladder: str, said: str) -> None:
    (mistake,) = mistakes(f"surfaces.voice.ladder = {{{ladder}}}")
    assert mistake.startswith(f"headrace.toml: surfaces.voice.ladder{said}")


def test_every_broken_rule_is_told_at_once() -> None:
    found = mistakes(
        f"""
        default_model = "b"
        models.a = {{variants.x = {{}}, upstreams.x.{URL}}}
        surfaces.chat.ladder.steps = [{{step = "trim", queue_ms = [1, 2], slack_ms = [2, 1]}}]
        surfaces.phone.ladder.preset = true
        keys = [{{name = "k", key_env = "K", tenant = "t"}}]
        tenants.t.budgets = [{{limit_micros = 1, period = "day", then = "a@y"}}]
        prices.a = {{input = 0.0000001, output = 1}}
        prices.b = {{}}
        cache.semantic = {{mode = "on", embedder = "c"}}
        shaping.summary_model = "d"
        routing.splits.s.percent = {{a = 50, "a@x" = 49}}
        fast.variant = "@y"
        """
    )
    assert [mistake.split(": ")[1] for mistake in found] == [
        "default_model",
        "models.a.upstreams.x",
        "surfaces.chat.ladder.steps[0].queue_ms",
        "surfaces.chat.ladder.steps[0].slack_ms",
        "surfaces.phone",
        "keys[0].key_env",
        "tenants.t.budgets[0].then",
        "fast.variant",
        "routing.splits.s.percent",
        "prices.a.input",
        "prices.b",
        "cache.semantic.embedder",
        "shaping.summary_model",
    ]
