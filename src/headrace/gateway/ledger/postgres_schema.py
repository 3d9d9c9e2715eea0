"""The ledger's tables in Postgres, their migrations, and the functions that lease budgets and count what is spent.

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
    """
    DROP FUNCTION ledger_hold(text, text, text, text, text, text, bigint[], bigint, integer);
    ALTER TABLE ledger_periods DROP COLUMN held;
    ALTER TABLE ledger_open DROP COLUMN held;
    -- Until then, by the database's clock, the leases of a gateway count.
    ALTER TABLE ledger_gateways ADD COLUMN lease_until timestamptz NOT NULL DEFAULT '-infinity';

    -- What gateways may spend of a budget. A charge that is written lessens its gateway's lease.
    CREATE TABLE ledger_leases (
        tenant text COLLATE "C" NOT NULL,
        endpoint text COLLATE "C" NOT NULL,
        period text COLLATE "C" NOT NULL,
        run text NOT NULL,  -- the gateway's process
        leased bigint NOT NULL DEFAULT 0,  -- micros
        version bigint NOT NULL DEFAULT 0,  -- rises with each change
        wanted boolean NOT NULL DEFAULT false,  -- another gateway needs what this one does not use
        PRIMARY KEY (tenant, endpoint, period, run)
    ) WITH (fillfactor = 50);
    CREATE INDEX ledger_leases_by_run ON ledger_leases (run);

    CREATE FUNCTION ledger_leased_to_others(p_run text, p_tenant text, p_endpoint text, p_period text)
    RETURNS bigint LANGUAGE sql AS $$
        SELECT coalesce(sum(l.leased), 0)::bigint FROM ledger_leases l JOIN ledger_gateways g ON g.run = l.run
        WHERE l.tenant = p_tenant AND l.endpoint = p_endpoint AND l.period = p_period AND l.run <> p_run
            AND g.lease_until > clock_timestamp();
    $$;

    -- Leases what is needed or, if it is more, a gateway's share of a percentage of what is left. It never leases more
    -- than is left, and nothing if that is of no use. A negative amount gives back, unless the lease has changed since
    -- that version.
    CREATE FUNCTION ledger_lease(
        p_run text, p_tenant text, p_endpoint text, p_period text, p_limit bigint, p_micros bigint, p_least bigint,
        p_version bigint, p_percent integer
    ) RETURNS TABLE (o_spent bigint, o_others bigint, o_leased bigint, o_version bigint) LANGUAGE plpgsql AS $$
    DECLARE
        v_left bigint;
        v_gateways bigint;
        v_added bigint := 0;
    BEGIN
        LOOP  -- whoever changes leases or what is spent locks this row first
            SELECT p.spent INTO o_spent FROM ledger_periods p
                WHERE p.tenant = p_tenant AND p.endpoint = p_endpoint AND p.period = p_period FOR UPDATE;
            EXIT WHEN FOUND;
            INSERT INTO ledger_periods (tenant, endpoint, period)
                VALUES (p_tenant, p_endpoint, p_period) ON CONFLICT DO NOTHING;
        END LOOP;
        INSERT INTO ledger_leases (tenant, endpoint, period, run)
            VALUES (p_tenant, p_endpoint, p_period, p_run) ON CONFLICT DO NOTHING;
        SELECT l.leased, l.version INTO o_leased, o_version FROM ledger_leases l
            WHERE l.tenant = p_tenant AND l.endpoint = p_endpoint AND l.period = p_period AND l.run = p_run FOR UPDATE;
        o_others := ledger_leased_to_others(p_run, p_tenant, p_endpoint, p_period);
        IF p_micros >= 0 THEN
            v_left := greatest(0, p_limit - o_spent - o_others - o_leased);
            SELECT greatest(1, count(*)) INTO v_gateways FROM ledger_gateways g
                WHERE g.lease_until > clock_timestamp();
            IF v_left >= p_least THEN
                v_added := least(v_left, greatest(p_micros, v_left * p_percent / 100 / v_gateways));
            END IF;
            IF v_left < p_micros THEN
                UPDATE ledger_leases l SET wanted = true
                    WHERE l.tenant = p_tenant AND l.endpoint = p_endpoint AND l.period = p_period
                        AND l.run <> p_run AND l.leased > 0;
            END IF;
        ELSIF o_version = p_version THEN
            v_added := greatest(p_micros, -o_leased);
        END IF;
        UPDATE ledger_leases l SET leased = l.leased + v_added, version = l.version + 1,
            wanted = l.wanted AND p_micros < 0 AND l.version <> p_version
            WHERE l.tenant = p_tenant AND l.endpoint = p_endpoint AND l.period = p_period AND l.run = p_run
            RETURNING l.leased, l.version INTO o_leased, o_version;
        RETURN NEXT;
    END
    $$;

    -- Counts what was spent, and lessens the gateway's lease by what it has spent itself.
    CREATE FUNCTION ledger_spend(
        p_run text, p_tenant text, p_endpoint text, p_period text, p_spent bigint, p_own bigint
    ) RETURNS TABLE (o_spent bigint, o_others bigint, o_leased bigint, o_version bigint) LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO ledger_periods AS p (tenant, endpoint, period, spent)
            VALUES (p_tenant, p_endpoint, p_period, p_spent)
            ON CONFLICT (tenant, endpoint, period) DO UPDATE SET spent = p.spent + excluded.spent
            RETURNING p.spent INTO o_spent;
        UPDATE ledger_leases l SET leased = greatest(0, l.leased - p_own), version = l.version + 1
            WHERE l.tenant = p_tenant AND l.endpoint = p_endpoint AND l.period = p_period AND l.run = p_run
            RETURNING l.leased, l.version INTO o_leased, o_version;
        o_leased := coalesce(o_leased, 0);
        o_version := coalesce(o_version, 0);
        o_others := ledger_leased_to_others(p_run, p_tenant, p_endpoint, p_period);
        RETURN NEXT;
    END
    $$;

    -- Keeps a gateway's leases. They have lapsed if others may have counted them as ended, with a margin for statements
    -- that are under way.
    CREATE FUNCTION ledger_renew(p_run text, p_seconds double precision)
    RETURNS TABLE (lapsed boolean, tenants text[], endpoints text[], periods text[]) LANGUAGE plpgsql AS $$
    BEGIN
        SELECT g.lease_until < clock_timestamp() + make_interval(secs => p_seconds / 10) INTO lapsed
            FROM ledger_gateways g WHERE g.run = p_run FOR UPDATE;
        lapsed := coalesce(lapsed, true);
        IF lapsed THEN
            UPDATE ledger_leases l SET leased = 0, version = l.version + 1048576, wanted = false WHERE l.run = p_run;
        END IF;
        INSERT INTO ledger_gateways AS g (run, seen, lease_until)
            VALUES (p_run, clock_timestamp(), clock_timestamp() + make_interval(secs => p_seconds))
            ON CONFLICT (run) DO UPDATE SET seen = excluded.seen, lease_until = excluded.lease_until;
        SELECT coalesce(array_agg(l.tenant), '{}'), coalesce(array_agg(l.endpoint), '{}'),
                coalesce(array_agg(l.period), '{}')
            INTO tenants, endpoints, periods FROM ledger_leases l WHERE l.run = p_run AND l.wanted;
        RETURN NEXT;
    END
    $$;
    """,
)

_SUMS: Final = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "machine_us", "micros")

LEASE: Final = """
    SELECT o_spent, o_version, o_others, o_leased
    FROM unnest($3::text[], $4::text[], $5::text[], $6::bigint[], $7::bigint[], $8::bigint[], $9::bigint[])
        WITH ORDINALITY AS new (tenant, endpoint, period, budget, micros, part, version, place),
    LATERAL ledger_lease($1, new.tenant, new.endpoint, new.period, budget, micros, part, version, $2)
    ORDER BY place
"""
SPEND: Final = """
    SELECT o_spent, o_version, o_others, o_leased
    FROM unnest($2::text[], $3::text[], $4::text[], $5::bigint[], $6::bigint[])
        WITH ORDINALITY AS new (tenant, endpoint, period, spent, own, place),
    LATERAL ledger_spend($1, new.tenant, new.endpoint, new.period, new.spent, own)
    ORDER BY place
"""
RENEW: Final = "SELECT * FROM ledger_renew($1, $2)"
END_LEASES: Final = "UPDATE ledger_gateways SET lease_until = '-infinity' WHERE run = $1"
KNOWN: Final = "SELECT * FROM ledger_charges WHERE id = ANY($1) ORDER BY id FOR UPDATE"
CHARGE: Final = """
    INSERT INTO ledger_charges SELECT * FROM unnest(
        $1::text[], $2::text[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
        $10::boolean[], $11::text[], $12::bigint[], $13::bigint[], $14::bigint[], $15::bigint[], $16::bigint[],
        $17::text[], $18::boolean[]
    ) ON CONFLICT DO NOTHING RETURNING id
"""
OPENED: Final = """
    INSERT INTO ledger_open (id, run, tenant, endpoint, day, reserved)
    SELECT id, $2, tenant, endpoint, day, reserved
    FROM unnest($1::text[], $3::text[], $4::text[], $5::text[], $6::text[]) AS new (id, tenant, endpoint, day, reserved)
    ON CONFLICT DO NOTHING
"""
MOVED: Final = """
    UPDATE ledger_open SET output_tokens = new.output_tokens, machine_us = new.machine_us, micros = new.micros
    FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[]) AS new (id, output_tokens, machine_us, micros)
    WHERE ledger_open.id = new.id
"""
ENDED: Final = """
    WITH ended AS (SELECT id FROM ledger_open WHERE id = ANY($1) ORDER BY id FOR UPDATE)
    DELETE FROM ledger_open USING ended WHERE ledger_open.id = ended.id
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
DEAD: Final = "UPDATE ledger_gateways SET seen = '-infinity' WHERE run = $1"
TAKE: Final = """
    UPDATE ledger_open SET run = $1, taken = true WHERE id IN (
        SELECT id FROM ledger_open JOIN ledger_gateways USING (run)
        WHERE seen < now() - make_interval(secs => $2) ORDER BY id LIMIT $3 FOR UPDATE OF ledger_open SKIP LOCKED
    ) RETURNING reserved, output_tokens, machine_us, micros
"""
FORGET_LEASES: Final = """
    DELETE FROM ledger_leases WHERE (run = $1 AND period < left($2, 7))  -- of earlier months, and of their days
    OR run NOT IN (SELECT run FROM ledger_gateways)
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
