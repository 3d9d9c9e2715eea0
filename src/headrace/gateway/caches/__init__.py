"""The exact cache: the same request again gets the same answer again, without the engine.

key      what makes two requests the same request
prompts  what was rendered and tokenised of late
entries  an answer as bytes
stores   where entries live: memory, sqlite, Redis; each behind a bound and a breaker
flight   identical requests under way share one generation
modes    how far a cache is trusted, for all tenants or for one; the semantic cache's, too
exact    all of it together, as the flow uses it
"""
