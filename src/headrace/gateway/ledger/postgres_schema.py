"""The ledger's tables in Postgres, their migrations, and the function that holds budget.

Texts compare by their bytes, as Python's do, so that every gateway locks the rows of budgets in one order.
"""

from __future__ import annotations

from typing import Final

# Migrations: step N leads from version N to N + 1. A released step never changes.
STEPS: Final = (
    """
    CREATE TABLE ledger_charges (
        id text COLLATE "C" PRIMARY KEY,
        day text COLLATE "C" NOT NULL,
        at bigint NOT NULL,
        tenant text COLLATE "C" NOT NULL,
        key text COLLATE "C" NOT NULL,
        endpoint text COLLATE "C" NOT NULL,
        model text COLLATE "C" NOT NULL,
        variant text COLLATE "C" NOT NULL,
        surface text COLLATE "C" NOT NULL,
        counted boolean NOT NULL,
        ended text NOT NULL,
        prompt_tokens bigint NOT NULL,
        cached_tokens bigint NOT NULL,
        output_tokens bigint NOT NULL,
        machine_us bigint NOT NULL,
        micros bigint NOT NULL,
        saved text NOT NULL,  -- JSON: micros by what saved them
        final boolean NOT NULL  -- false: what was known when its gateway seemed dead
    );
    CREATE INDEX ledger_charges_by_day ON ledger_charges (day);

    CREATE TABLE ledger_days (
        day text COLLATE "C" NOT NULL,
        tenant text COLLATE "C" NOT NULL,
        key text COLLATE "C" NOT NULL,
        endpoint text COLLATE "C" NOT NULL,
        model text COLLATE "C" NOT NULL,
        variant text COLLATE "C" NOT NULL,
        surface text COLLATE "C" NOT NULL,
        source text COLLATE "C" NOT NULL,  -- empty: what was charged; else what saved these micros
        requests bigint NOT NULL,
        prompt_tokens bigint NOT NULL,
        cached_tokens bigint NOT NULL,
        output_tokens bigint NOT NULL,
        machine_us bigint NOT NULL,
        micros bigint NOT NULL,
        PRIMARY KEY (day, tenant, key, endpoint, model, variant, surface, source)
    );

    CREATE TABLE ledger_periods (
        tenant text COLLATE "C" NOT NULL,
        endpoint text COLLATE "C" NOT NULL,  -- empty: all of them
        period text COLLATE "C" NOT NULL,  -- a day or a month
        spent bigint NOT NULL DEFAULT 0,
        held bigint NOT NULL DEFAULT 0,  -- for exchanges that run
        PRIMARY KEY (tenant, endpoint, period)
    ) WITH (fillfactor = 50);  -- these rows change all the time

    -- Exchanges that run. What a gateway that died leaves here, another one takes over.
    CREATE TABLE ledger_open (
        id text COLLATE "C" PRIMARY KEY,
        run text NOT NULL,  -- the gateway's process
        opened timestamptz NOT NULL DEFAULT now(),
        taken boolean NOT NULL DEFAULT false,  -- its gateway died; the one that is named here charges it
        tenant text COLLATE "C" NOT NULL,
        endpoint text COLLATE "C" NOT NULL,
        day text COLLATE "C" NOT NULL,
        held bigint NOT NULL,
        reserved text NOT NULL,  -- JSON
        output_tokens bigint NOT NULL DEFAULT 0,
        machine_us bigint NOT NULL DEFAULT 0,
        micros bigint NOT NULL DEFAULT 0  -- what it would be charged if it ended here
    );
    CREATE INDEX ledger_open_by_run ON ledger_open (run);

    CREATE TABLE ledger_gateways (
        run text PRIMARY KEY,
        seen timestamptz NOT NULL  -- by the database's clock
    );

    CREATE TABLE ledger_alerts (
        tenant text COLLATE "C" NOT NULL,
        endpoint text COLLATE "C" NOT NULL,
        period text COLLATE "C" NOT NULL,
        percent bigint NOT NULL,
        budget bigint NOT NULL,  -- micros
        spent bigint NOT NULL,
        at bigint NOT NULL,
        sent boolean,  -- null: not yet; true: taken by the webhook; false: given up
        claimed timestamptz,  -- a gateway is sending it
        PRIMARY KEY (tenant, endpoint, period, percent)
    );
    CREATE INDEX ledger_alerts_to_send ON ledger_alerts (at) WHERE sent IS NULL;

    -- Holds money of four sums (of all endpoints and of one, in a month and in a day), all or nothing, in place of what
    -- this exchange held before. What is returned is what others have spent and hold. Rows are locked in one order.
    CREATE FUNCTION ledger_hold(
        p_id text, p_run text, p_tenant text, p_endpoint text, p_day text, p_reserved text,
        p_limits bigint[], p_micros bigint, p_wait_ms integer
    ) RETURNS TABLE (granted boolean, spent bigint[], held bigint[]) LANGUAGE plpgsql AS $$
    DECLARE
        v_endpoints text[] := ARRAY['', '', p_endpoint, p_endpoint];
        v_periods text[] := ARRAY[left(p_day, 7), p_day, left(p_day, 7), p_day];
        v_before bigint;
        v_running boolean;
        v_spent bigint;
        v_held bigint;
    BEGIN
        PERFORM set_config('lock_timeout', p_wait_ms::text, true);
        -- Others wait for these rows until the commit. Should the database's machine lose it, the gateway has it.
        PERFORM set_config('synchronous_commit', 'off', true);
        granted := true;
        spent := '{}';
        held := '{}';
        SELECT o.held INTO v_before FROM ledger_open o WHERE o.id = p_id FOR UPDATE;
        v_running := FOUND;
        v_before := coalesce(v_before, 0);
        FOR i IN 1 .. 4 LOOP
            LOOP
                SELECT p.spent, p.held INTO v_spent, v_held FROM ledger_periods p
                    WHERE p.tenant = p_tenant AND p.endpoint = v_endpoints[i] AND p.period = v_periods[i] FOR UPDATE;
                EXIT WHEN FOUND;
                INSERT INTO ledger_periods (tenant, endpoint, period)
                    VALUES (p_tenant, v_endpoints[i], v_periods[i]) ON CONFLICT DO NOTHING;
            END LOOP;
            v_held := v_held - v_before;
            spent := spent || v_spent;
            held := held || v_held;
            IF v_spent + v_held + p_micros > p_limits[i] THEN  -- never, where there is no limit
                granted := false;
            END IF;
        END LOOP;
        IF granted THEN
            FOR i IN 1 .. 4 LOOP
                UPDATE ledger_periods p SET held = p.held + p_micros - v_before
                    WHERE p.tenant = p_tenant AND p.endpoint = v_endpoints[i] AND p.period = v_periods[i];
            END LOOP;
            IF v_running THEN
                UPDATE ledger_open o SET held = p_micros WHERE o.id = p_id;
            ELSE
                INSERT INTO ledger_open (id, run, tenant, endpoint, day, held, reserved)
                    VALUES (p_id, p_run, p_tenant, p_endpoint, p_day, p_micros, p_reserved);
            END IF;
        END IF;
        RETURN NEXT;
    END
    $$;
    """,
)

_SUMS: Final = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "machine_us", "micros")

HOLD: Final = """
    SELECT granted, spent, held
    FROM unnest(
        $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bigint[], $9::bigint[], $10::bigint[],
        $11::bigint[], $12::bigint[]
    ) WITH ORDINALITY AS new (id, tenant, endpoint, day, reserved, micros, first, second, third, fourth, place),
    LATERAL ledger_hold(
        new.id, $1, new.tenant, new.endpoint, new.day, new.reserved, ARRAY[first, second, third, fourth], micros, $2
    )
    ORDER BY place
"""
KNOWN: Final = "SELECT * FROM ledger_charges WHERE id = ANY($1) ORDER BY id FOR UPDATE"
CHARGE: Final = """
    INSERT INTO ledger_charges SELECT * FROM unnest(
        $1::text[], $2::text[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
        $10::boolean[], $11::text[], $12::bigint[], $13::bigint[], $14::bigint[], $15::bigint[], $16::bigint[],
        $17::text[], $18::boolean[]
    ) ON CONFLICT DO NOTHING RETURNING id
"""
OPENED: Final = """
    INSERT INTO ledger_open (id, run, tenant, endpoint, day, held, reserved)
    SELECT id, $2, tenant, endpoint, day, 0, reserved
    FROM unnest($1::text[], $3::text[], $4::text[], $5::text[], $6::text[]) AS new (id, tenant, endpoint, day, reserved)
    ON CONFLICT DO NOTHING
"""
MOVED: Final = """
    UPDATE ledger_open SET output_tokens = new.output_tokens, machine_us = new.machine_us, micros = new.micros
    FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[]) AS new (id, output_tokens, machine_us, micros)
    WHERE ledger_open.id = new.id
"""
ENDING: Final = "SELECT id, tenant, endpoint, day, held FROM ledger_open WHERE id = ANY($1) ORDER BY id FOR UPDATE"
PERIODS: Final = """
    INSERT INTO ledger_periods
    SELECT tenant, endpoint, period, spent, held FROM unnest(
        $1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[]
    ) WITH ORDINALITY AS new (tenant, endpoint, period, spent, held, place) ORDER BY place
    ON CONFLICT (tenant, endpoint, period) DO UPDATE
    SET spent = ledger_periods.spent + excluded.spent, held = ledger_periods.held + excluded.held
    RETURNING tenant, endpoint, period, spent
"""
DAYS: Final = """
    INSERT INTO ledger_days
    SELECT day, tenant, key, endpoint, model, variant, surface, source,
        requests, prompt_tokens, cached_tokens, output_tokens, machine_us, micros
    FROM unnest(
        $1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
        $9::bigint[], $10::bigint[], $11::bigint[], $12::bigint[], $13::bigint[], $14::bigint[]
    ) WITH ORDINALITY AS new (
        day, tenant, key, endpoint, model, variant, surface, source,
        requests, prompt_tokens, cached_tokens, output_tokens, machine_us, micros, place
    ) ORDER BY place
    ON CONFLICT (day, tenant, key, endpoint, model, variant, surface, source) DO UPDATE SET """ + ", ".join(
    f"{name} = ledger_days.{name} + excluded.{name}" for name in _SUMS
)
ALERT: Final = """
    INSERT INTO ledger_alerts (tenant, endpoint, period, percent, budget, spent, at)
    VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING RETURNING at
"""
CLAIM: Final = """
    UPDATE ledger_alerts SET claimed = now() WHERE (tenant, endpoint, period, percent) = (
        SELECT tenant, endpoint, period, percent FROM ledger_alerts
        WHERE sent IS NULL AND (claimed IS NULL OR claimed < now() - make_interval(secs => $1))
        ORDER BY at, tenant, endpoint, period, percent LIMIT 1 FOR UPDATE SKIP LOCKED
    ) RETURNING tenant, endpoint, period, percent, budget, spent, at
"""
SENT: Final = "UPDATE ledger_alerts SET sent = $5 WHERE tenant = $1 AND endpoint = $2 AND period = $3 AND percent = $4"
SEEN: Final = """
    INSERT INTO ledger_gateways (run, seen) VALUES ($1, now()) ON CONFLICT (run) DO UPDATE SET seen = now()
"""
DEAD: Final = "UPDATE ledger_gateways SET seen = '-infinity' WHERE run = $1"
TAKE: Final = """
    UPDATE ledger_open SET run = $1, taken = true WHERE id IN (
        SELECT id FROM ledger_open JOIN ledger_gateways USING (run)
        WHERE seen < now() - make_interval(secs => $2) ORDER BY id LIMIT $3 FOR UPDATE OF ledger_open SKIP LOCKED
    ) RETURNING reserved, output_tokens, machine_us, micros
"""
FORGET: Final = """
    DELETE FROM ledger_gateways WHERE seen < now() - interval '1 day'
    AND NOT EXISTS (SELECT FROM ledger_open WHERE ledger_open.run = ledger_gateways.run)
"""
LEFT: Final = """
    SELECT id FROM ledger_open WHERE run = $1 AND NOT taken AND opened < now() - make_interval(secs => $2)
    ORDER BY opened LIMIT $3
"""
PRUNE: Final = """
    DELETE FROM ledger_charges WHERE id IN (
        SELECT id FROM ledger_charges WHERE day < $1 ORDER BY id LIMIT $2 FOR UPDATE SKIP LOCKED
    ) RETURNING 1
"""
