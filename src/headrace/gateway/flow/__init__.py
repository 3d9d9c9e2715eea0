"""The stages of the flow, in its order: each is a function of the Course of one exchange.

course    what the stages leave for each other
prepare   identify, route, degrade, shape
admit     limits and budgets
recall    an answer that nobody needs to generate
generate  who makes the answer
deliver   the pieces on their way out
settle    the end
"""
