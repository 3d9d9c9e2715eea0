"""Caches of whole answers, and the policy of how far each tenant trusts them.

exact     the same request again gets the same answer; identical requests under way share one generation
semantic  a question in other words gets the answer to the same question
"""
