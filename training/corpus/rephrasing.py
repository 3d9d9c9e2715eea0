"""Other wordings of a question, from its form or word by word: `How do I lower TTFT?` is also `How can I cut TTFT?`.

A small model learns from these which wordings ask for the same. Owns the forms and the synonyms. Knows nothing of what
is asked, and not which wordings are held out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random
from typing import Final

from training.corpus.wording import lower_first

PURPOSE = (
    "What is the job of {0}?",
    "What is {0} for?",
    "What is the use of {0}?",
    "What is the purpose of {0}?",
    "What is {0} good for?",
)
GAIN = (
    "What is gained by {0}?",
    "What is the advantage of {0}?",
    "What are the benefits of {0}?",
    "Why would I use {0}?",
    "What is the point of {0}?",
)

# A form and its other wordings; {0}, {1} ... are what the groups of the form match. The first form that fits is taken.
FORMS = [
    (re.compile(form), wordings)
    for form, wordings in (
        (
            r"What is the difference between (.+) and (.+)\?",
            (
                "Is there a difference between {0} and {1}?",
                "Is there a difference between {1} and {0}?",
                "Explain the difference between {0} and {1}.",
                "I mix up {0} and {1}. What is the difference?",
                "What distinguishes {0} from {1}?",
                "What distinguishes {1} from {0}?",
                "{1} or {0}, what is the difference?",
                "What sets {0} and {1} apart?",
            ),
        ),
        (
            r"How does (.+) differ from (.+)\?",
            (
                "How is {0} different from {1}?",
                "How is {1} different from {0}?",
                "How does {1} differ from {0}?",
                "In what does {0} differ from {1}?",
            ),
        ),
        (
            r"How do I (.+)\?",
            (
                "How can I {0}?",
                "How to {0}?",
                "I want to {0}. How?",
                "Can you tell me how to {0}?",
                "What do I have to do to {0}?",
                "How would I {0}?",
            ),
        ),
        (
            r"What does (--\S+) do in (headrace \S+)\?",
            (
                "What is {0} for in {1}?",
                "Explain {0} of {1}.",
                "Explain the {0} flag of {1}.",
                "What is the {0} flag of {1}?",
                "When do I use {0} in {1}?",
                "Tell me about {1} {0}.",
                "{1} {0}?",
                "In {1}, what does {0} do?",
                "What is the effect of {0} in {1}?",
            ),
        ),
        (r"What does (.+) do\?", (*PURPOSE, "Tell me what {0} does.", "What is done by {0}?")),
        (
            r"What is (.+)(?<!known)(?<!used)(?<!good) for in (.+)\?",
            ("What is {0} good for in {1}?", "In {1}, what is {0} for?"),
        ),
        (r"What is (.+)(?<!known)(?<!used)(?<!good) for\?", PURPOSE),
        (
            r"How does (.+) work\?",
            (
                "Explain how {0} works.",
                "What is the idea of {0}?",
                "What is the principle of {0}?",
                "Tell me how {0} works.",
                "How exactly does {0} work?",
                "Can you describe how {0} works?",
            ),
        ),
        (r"Why use (.+)\?", GAIN),
        (r"What is gained by (.+)\?", GAIN),
        (
            r"When does (.+) help\?",
            ("In which cases does {0} help?", "When is {0} a good idea?", "When is {0} useful?"),
        ),
        (
            r"When is (.+) useful\?",
            ("In which cases is {0} useful?", "When is {0} a good idea?", "When does {0} help?"),
        ),
        (
            r"What does (.+) mean in Headrace\?",
            (
                "How does Headrace define {0}?",
                "In Headrace, what does {0} mean?",
                "What is the meaning of {0} in Headrace?",
                "Define {0} as Headrace uses it.",
                "What is {0} in Headrace?",
            ),
        ),
        (
            r"How (?:is|are) (.+) (?:computed|calculated)\?",
            (
                "How do you compute {0}?",
                "How do I work out {0}?",
                "How can I compute {0}?",
                "What is the formula for {0}?",
            ),
        ),
        (r"What is the formula (?:of|for) (.+)\?", ("Give me the formula for {0}.", "How do I compute {0}?")),
        (
            r"(?:Can Headrace load|Does Headrace support) (.+)\?",
            ("Does {0} work in Headrace?", "Will Headrace load {0}?", "May I use {0} with Headrace?"),
        ),
        (
            r"Does Headrace need (.+)\?",
            ("Is {0} needed by Headrace?", "Do I need {0} for Headrace?", "Is {0} required by Headrace?"),
        ),
        (
            r"What are the (.+) of Headrace\?",
            (
                "What are Headrace's {0}?",
                "Tell me the {0} of Headrace.",
                "Which {0} are there in Headrace?",
                "Name Headrace's {0}.",
            ),
        ),
        (
            r"What is in (.+)\?",
            ("What does {0} contain?", "What is the content of {0}?", "What do I find in {0}?"),
        ),
        (
            r"What does (.+) mean\?",
            ("What is the meaning of {0}?", "How should I understand {0}?", "What is {0} supposed to mean?"),
        ),
        (
            r"Which part of Headrace (.+)\?",
            ("Which folder of Headrace {0}?", "I am looking for the part of Headrace that {0}."),
        ),
        (
            r"Which (command|make target|flag|endpoint|API parameter|parameter|header|status|variable|file|engine|model"
            r"|stage of Headrace) ((?!is|does|has|was)[a-z]+s .+)\?",
            (
                "What is the {0} that {1}?",
                "I am looking for the {0} that {1}.",
                "Name the {0} that {1}.",
                "What {0} {1}?",
            ),
        ),
        (r"How large (.+)\?", ("How big {0}?",)),
        (r"How much (.+)\?", ("Tell me, how much {0}?",)),
        (r"What causes (.+)\?", ("What is the cause of {0}?", "Where does {0} come from?")),
        (r"What is the danger of (.+)\?", ("Why is {0} dangerous?", "What is the risk of {0}?")),
        (r"What is (.+) used for\?", ("For what is {0} used?", "What is the use of {0}?")),
        (r"Which values can (.+) have\?", ("What are the values of {0}?", "What can {0} be?")),
        (r"(?:What|Which) (.+) does Headrace (have|support|use)\?", ("What are the {0} that Headrace can {1}?",)),
    )
]
PLACE = re.compile(r"(.+) in (Headrace|headrace \S+)\?")  # where it is asked about may be said first


def rephrased(question: str) -> Iterator[str]:
    """Other wordings of the question, as far as its form is known."""
    for form, wordings in FORMS:
        found = form.fullmatch(question)
        if found:
            for wording in wordings:
                text = wording.format(*found.groups())
                yield text[0].upper() + text[1:] if wording[0] != "{" else text
            break
    found = PLACE.fullmatch(question)
    if found and not found[1].startswith("In "):
        yield f"In {found[2]}, {lower_first(found[1])}?"


# Words of which each may stand for any other of its line in a question; none is the name of a command or a setting.
SYNONYMS: Final = {
    word: line.split()
    for line in """
        show print display report
        shows prints displays reports
        shown printed displayed reported
        makes creates produces
        made created produced
        use employ
        used employed applied
        need require
        needs requires
        needed required necessary
        folder directory
        large big
        larger bigger
        small little
        fast quick
        faster quicker
        choose pick select
        chooses picks selects
        chosen picked selected
        happens occurs
        begin start
        begins starts
        delete remove
        deletes removes
        deleted removed
        limits caps bounds
        limited capped bounded
        idea principle concept
        difference distinction
        explain describe
        measures gauges
        compute calculate
        computes calculates
        computed calculated
        cause reason
        causes reasons
        advantage benefit gain
        danger risk
        problem trouble issue
        reduce lower decrease cut
        reduces lowers decreases cuts
        increase raise
        increases raises
        improve better
        users people
        several multiple
        allowed permitted
        allows permits
        find locate
        kind type sort
        kinds types sorts
        reply answer
        replies answers
        machine computer
        keep hold
        keeps holds
        kept held stored saved
        alter change modify
        alters changes modifies
        changed altered modified
        verify check
        verifies checks
        affect influence
        affects influences
        fraction share part
        wrong incorrect
        right correct
        execute run
        executes runs
        short brief
        typical usual
        important relevant
        often frequently
        receive get obtain
        receives gets obtains
        prevent avoid
        prevents avoids
        decides determines
        combine mix join
        divide split
        divides splits
        contains includes
        sends passes
        sent passed
        purpose aim
        way method
        meant intended
        """.splitlines()
    for word in line.split()
}
SWAPPED: Final = 0.5  # of the words that have synonyms
MARKS: Final = ",.;:?!()"  # a word that begins or ends with another sign is a name
COMMANDS: Final = frozenset(("headrace", "make"))  # what follows is the name of a command


def with_synonyms(random: Random, question: str) -> str:
    """The question with other words in place of some of its own."""
    words = question.split(" ")
    found: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        stem = word.strip(MARKS)
        others = [other for other in SYNONYMS.get(stem, ()) if other != stem]
        if others and before.casefold() not in COMMANDS and random.random() < SWAPPED:
            word = word.replace(stem, random.choice(others))
        found.append(word)
    return " ".join(found)
