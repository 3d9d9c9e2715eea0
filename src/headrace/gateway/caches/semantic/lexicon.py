"""The words that the guards know: opposites, alternatives, synonyms, and the small words of seven languages.

Owns lists of English words and nothing else; what is made of them is for `words`, `question` and `guards`. A word
that is missing here costs a wrong refusal (a synonym) or is left to the score (an opposite), so lists may grow at
any time.
"""

from __future__ import annotations

from typing import Final

# Verbs with a particle, which become one word: `turn it off` is turn_off.
PARTICLES: Final = {
    verb: frozenset(particles.split())
    for verb, particles in {
        "back": "up",
        "bring": "back up down",
        "check": "in out",
        "clean": "up",
        "fade": "in out",
        "fill": "in out",
        "free": "up",
        "get": "back",
        "give": "back up",
        "hand": "in out over",
        "leave": "out",
        "lock": "out",
        "log": "in out on off",
        "look": "up",
        "opt": "in out",
        "phase": "in out",
        "plug": "in",
        "power": "on off up down",
        "roll": "out back",
        "run": "out",
        "scale": "up down in out",
        "scroll": "up down",
        "send": "back",
        "set": "up",
        "shut": "down off",
        "sign": "in out up off",
        "slow": "down",
        "speed": "up",
        "spin": "up down",
        "start": "up",
        "step": "up down",
        "switch": "on off",
        "take": "down away back",
        "tear": "down",
        "turn": "on off up down",
        "unplug": "",
        "wake": "up",
        "wind": "up down",
        "zoom": "in out",
    }.items()
}

# What is said in one way for all: spellings, short forms and fixed phrases, before anything else is looked at.
PHRASES: Final = {
    "as well as": "and",
    "at the same time": "at once",
    "at what time": "when",
    "by whom": "who",
    "do away with": "remove",
    "e mail": "email",
    "free of charge": "free",
    "fail to": "not",
    "failed to": "not",
    "fails to": "not",
    "failing to": "not",
    "front end": "frontend",
    "back end": "backend",
    "get rid of": "remove",
    "gift card": "giftcard",
    "hardly ever": "never",
    "hold off": "wait",
    "how come": "why",
    "how expensive are": "how much are",
    "how expensive is": "how much is",
    "customer service": "customer support",
    "in order to": "to",
    "is there a way to": "can i",
    "is there any way to": "can i",
    "is it possible to": "can i",
    "am i able to": "can i",
    "am i allowed to": "can i",
    "make sure": "ensure",
    "most recent": "latest",
    "no longer": "not",
    "out of date": "outdated",
    "prior to": "before",
    "ahead of": "before",
    "in advance": "beforehand",
    "in front of": "before",
    "right now": "now",
    "is there something i can do to": "can i",
    "is there something that i can do to": "can i",
    "short for": "mean",
    "stand for": "mean",
    "stands for": "mean",
    "unless": "if not",
    "up to date": "current",
    "use up": "run_out",
    "used up": "run_out",
    "what about": "what_about",
    "what time": "when",
    "what is the reason": "why",
    "what could be the reason": "why",
    "what is causing": "why",
}
SHORT_FORMS: Final = {
    "abbr": "abbreviation",
    "admins": "administrators",
    "admin": "administrator",
    "app": "application",
    "apps": "applications",
    "auth": "authentication",
    "auto": "automatic",
    "bg": "background",
    "ci": "ci",
    "cmd": "command",
    "config": "configuration",
    "configs": "configurations",
    "conn": "connection",
    "db": "database",
    "dbs": "databases",
    "dev": "development",
    "dict": "dictionary",
    "dicts": "dictionaries",
    "dir": "directory",
    "doc": "documentation",
    "docs": "documentation",
    "env": "environment",
    "fav": "favourite",
    "info": "information",
    "int": "integer",
    "js": "javascript",
    "k8s": "kubernetes",
    "lib": "library",
    "libs": "libraries",
    "msg": "message",
    "ms": "ms",
    "org": "organisation",
    "perms": "permissions",
    "phone": "telephone",
    "pic": "picture",
    "pics": "pictures",
    "postgresql": "postgres",
    "pls": "please",
    "prod": "production",
    "pw": "password",
    "py": "python",
    "repo": "repository",
    "repos": "repositories",
    "spec": "specification",
    "specs": "specifications",
    "sso": "single sign on",
    "stats": "statistics",
    "temp": "temporary",
    "thx": "thanks",
    "tmp": "temporary",
    "ts": "typescript",
    "2fa": "two factor authentication",
    "u": "you",
    "ur": "your",
    "wanna": "want to",
    "gonna": "going to",
    "sat": "saturday",
    "sun": "sunday",
    "mon": "monday",
    "tue": "tuesday",
    "wed": "wednesday",
    "thu": "thursday",
    "fri": "friday",
}
IRREGULAR: Final = {
    "am": "be",
    "are": "be",
    "been": "be",
    "began": "begin",
    "begun": "begin",
    "being": "be",
    "bought": "buy",
    "broke": "break",
    "broken": "break",
    "built": "build",
    "came": "come",
    "children": "child",
    "chose": "choose",
    "chosen": "choose",
    "did": "do",
    "does": "do",
    "doing": "do",
    "done": "do",
    "driven": "drive",
    "fell": "fall",
    "fewer": "less",
    "forgot": "forget",
    "forgotten": "forget",
    "froze": "freeze",
    "frozen": "freeze",
    "gave": "give",
    "given": "give",
    "gone": "go",
    "got": "get",
    "gotten": "get",
    "grew": "grow",
    "grown": "grow",
    "had": "have",
    "has": "have",
    "having": "have",
    "hid": "hide",
    "hidden": "hide",
    "held": "hold",
    "indices": "index",
    "indexes": "index",
    "is": "be",
    "kept": "keep",
    "knew": "know",
    "notes": "note_text",
    "note": "note_text",
    "known": "know",
    "lost": "lose",
    "made": "make",
    "matrices": "matrix",
    "meant": "mean",
    "men": "man",
    "paid": "pay",
    "people": "person",
    "ran": "run",
    "rose": "rise",
    "risen": "rise",
    "said": "say",
    "saw": "see",
    "seen": "see",
    "sent": "send",
    "shown": "show",
    "sold": "sell",
    "spent": "spend",
    "sped": "speed",
    "spoke": "speak",
    "spoken": "speak",
    "taken": "take",
    "taught": "teach",
    "thought": "think",
    "told": "tell",
    "took": "take",
    "was": "be",
    "went": "go",
    "were": "be",
    "women": "woman",
    "won": "win",
    "written": "write",
    "wrote": "write",
}
# Comparatives and superlatives of these are found by their endings; the others are here.
ADJECTIVES: Final = frozenset(
    """big bright broad busy cheap clean clear close cold cool costly dark dear deep dirty dry early easy fast fine flat
    fresh great hard healthy heavy high hot large late light long loose loud low narrow near neat new nice noisy old
    poor quick quiet rare rich rough safe secure short simple slow small smart smooth soft strong tall thick thin
    tidy tight tiny tough warm weak wet wide wise young""".split()
)
GRADED: Final = {"better": "good", "best": "good", "worse": "bad", "worst": "bad"}

# Words for one thing. The first of a line names it.
SYNONYMS: Final = """
add append, advantage benefit pro upside strength plus, after afterward afterwards later following follow, answer
reply respond response, application program software, approve confirm endorse, allow permit grant whitelist allowlist
authorise, archive, before precede preceding prior beforehand earlier, begin start launch commence start_up, big
large huge, boot startup, bug error defect fault, buy purchase, cause reason, change modify edit update alter adjust,
check verify validate, choose pick select, client customer, close shut, combine join merge, company firm business,
connect link attach, copy duplicate clone, cost price fee pricing charge bill, create make build generate produce
compose write draft, decline reject refuse, decrease reduce lower cut lessen shrink fall, delete remove erase wipe
drop discard purge, deny block forbid prohibit disallow blacklist blocklist ban, detach disconnect unlink unhook,
difference differ distinguish different compare, directory folder, disable deactivate turn_off switch_off power_off,
disadvantage drawback con downside weakness, documentation manual guide handbook, easy simple, employee staff, enable
activate turn_on switch_on power_on, end finish, fail failure unsuccessful, fast quick speedy speed speed_up, fetch
retrieve get obtain receive, find locate, first initial earliest, fix repair mend resolve solve, full complete whole,
get_back regain recover restore bring_back reinstate, handle deal, hard difficult tough, help assist, hide conceal,
include contain comprise included including, exclude excluded excluding, increase raise grow rise boost, inform
notify alert, information data datum, last latest newest final, leave quit, licence license, list enumerate, location
place, log_in sign_in login signin, log_out sign_out logout signoff, mandatory required compulsory obligatory
requirement prerequisite, many multiple numerous several, wait await, maximum max, minimum min, modest small tiny
little, money_back refund, move transfer relocate, mute silence, parcel package shipment, plan subscription tier,
prevent avoid, problem issue trouble, purpose role, reach contact, recommend suggest advise, render draw, restart
reboot, restrict limit, result outcome, run execute, same identical equal, ship deliver, sick ill, site website, slow
slow_down, stop halt terminate, succeed pass success successful, set_up setup configure configuration, show display
reveal, task job, use utilise, way approach method process procedure step command, wrong incorrect, work function,
overnight, thread, manager boss, wage salary, colleague coworker, car automobile, photo picture image, tutorial
walkthrough, velocity, expire lapse, regularly periodically, belong, weird strange odd, attempt try, stuck hang
"""

# Opposites: A with B, each with what is said for it. Inflections and comparatives are found by themselves.
OPPOSITES: Final = """
above below, absent present, accept reject, accept decline, acquire release, activate deactivate, active
inactive, add remove, add subtract, add delete, admit deny, adult minor, advance delay, advantage disadvantage,
after before, agree disagree, ahead behind, allow block, allow deny, always never, approve decline, approve
reject, arrive depart, arrival departure, ascend descend, assemble disassemble, assign unassign, asynchronous
synchronous, attach detach, authorise forbid, automatic manual, available unavailable, bad good, beginner
expert, beginning end, benefit drawback, big small, bind unbind, block unblock, bottom top, boot shut_down,
bright dark, busy idle, busy quiet, buy sell, cheap expensive, cheap dear, check_in check_out, check uncheck,
clean dirty, clear cloudy, clockwise anticlockwise, close open, cold hot, cold warm, common rare, compatible
incompatible, compile decompile, complete incomplete, complete partial, compress decompress, compress extract,
connect disconnect, consistent inconsistent, consumer producer, correct wrong, couple decouple, create delete,
credit debit, dark light, decode encode, decrease increase, decrypt encrypt, deep shallow, deposit withdraw,
deprecated supported, deserialise serialise, destination source, disable enable, down up, downgrade upgrade,
download upload, downstream upstream, downtime uptime, dry wet, dynamic static, early late, early last, easy
hard, egress ingress, empty full, end start, enlarge shrink, enter exit, enter leave, entrance exit, exclude
include, excluding including, expand collapse, expand contract, explicit implicit, export import, extend
terminate, extend shorten, external internal, fade_in fade_out, fail succeed, fast slow, fill empty, find lose,
first last, follow unfollow, forget remember, forward backward, forward reverse, freeze thaw, freeze unfreeze,
frequent rare, front back, frontend backend, future past, gain loss, gain lose, general specific, global local,
grant revoke, guest host, guest administrator, hard soft, healthy unhealthy, healthy sick, heavy light, hide
show, high low, hire fire, horizontal vertical, identical different, inbound outbound, incoming outgoing,
incremental full, individual group, inner outer, input output, insert delete, inside outside, install uninstall,
join leave, join split, junior senior, keep delete, keep discard, last next, last old, leader follower, learn
forget, left right, lend borrow, less more, least most, like dislike, load unload, lock unlock, log_in log_out,
long short, loose tight, lossless lossy, loud quiet, lower upper, lowercase uppercase, mandatory optional,
marshal unmarshal, maximise minimise, maximum minimum, max min, mount unmount, mutable immutable, mute unmute,
narrow wide, near far, negative positive, new old, next previous, last previous, obtain lose, offline online,
opt_in opt_out, optimistic pessimistic, pack unpack, parent child, partial full, pass fail, pause resume,
permanent temporary, phase_in phase_out, pin unpin, plug_in unplug, polite rude, pop push, pull push, possible
impossible, predecessor successor, prepaid postpaid, profit loss, private public, prove disprove, publish
unpublish, reachable unreachable, read write, read edit, real virtual, receive send, recommend discourage,
reliable unreliable, reliable flaky, renew terminate, repair break, rich poor, roll_out roll_back, rough smooth,
safe dangerous, same different, save discard, scale_up scale_down, scale_in scale_out, scroll_up scroll_down,
secure insecure, sender receiver, serial parallel, several one, shared dedicated, short tall, signed unsigned,
single multiple, singular plural, sink source, sooner after, sorted unsorted, spin_up spin_down, stable
unstable, stage unstage, start stop, stateful stateless, stop continue, stop resume, strict lenient, strong
weak, subscribe unsubscribe, success failure, supported unsupported, symmetric asymmetric, take_down put_up,
thick thin, tie untie, trusted untrusted, turn_up turn_down, uplink downlink, used unused, valid invalid,
visible invisible, visible hidden, volatile persistent, wake_up sleep, win lose, wise unwise, with without,
within outside, wrap unwrap, young old, zip unzip, zoom_in zoom_out, everybody nobody, everything nothing,
deploy undeploy, wanted unwanted, under over, since until, beyond within, older younger, upload fetch, before
during, minus plus, cache bypass, archive restore, broadcast unicast, head tail, healthy dead, alive dead,
master branch, own rent, win defeat, ascending descending, archived active, enabled disabled
"""

# Things of which one excludes the others: where each side has one that the other has not, they ask for different
# things.
ALTERNATIVES: Final = """
staging production development sandbox preview, free starter basic team business enterprise premium personal trial,
administrator owner editor viewer guest member operator tenant moderator contractor, cpu memory disk network gpu
bandwidth, annual monthly weekly daily hourly quarterly nightly yearly, desktop mobile web tablet, unit integration
regression smoke acceptance, width height depth weight length colour font size, username password email avatar pin,
read write edit execute delete share, cheque cash bank paypal, invoice receipt quote contract statement, red green
blue yellow black white orange purple grey brown pink, north south east west, breakfast lunch dinner, morning noon
afternoon evening midnight night, spring summer autumn winter, seconds minutes hours days weeks months years, miles
kilometres metres feet yards inches, celsius fahrenheit kelvin, dollars euros pounds yen francs rupees, kilobytes
megabytes gigabytes terabytes, unique partial composite clustered, minimum maximum average median total, branch tag
commit release fork, comment thread post, table column row index schema, header footer sidebar menu toolbar,
primary foreign secondary, horizontal vertical diagonal, husband wife, mother father, brother sister, son daughter,
cat dog, symptom fix, definition example, domestic international, indoor outdoor, retail wholesale, gross net, left
right centre, keyboard mouse monitor, laptop desktop phone
"""

# Words that say how much of it: all of it, or this one alone.
ALL: Final = frozenset("all every each whole entire everybody everyone everything globally global always".split())
ONE: Final = frozenset("this single only sole just alone one".split())

NEGATIONS: Final = frozenset("not never no none neither nor cannot without nobody nothing nowhere lack except".split())

# Small words: they say nothing of what is asked. Question words, negations and prepositions are looked at elsewhere.
STOP: Final = frozenset(
    """a an the this that these those some any i me my mine we us our ours you your yours he him his she her it its they
    them their theirs one ones who whom whose what which when where why how be do have can could may might must shall
    should will would of in on at by for with to from into onto over under as than and or but if then so because
    while there here please just really very quite also too about up down out off again ever let get go want like
    need know meaning means stand stands define definition page question questions myself itself yourself themselves
    something anything someone somebody anybody thing good best easy way simple now actually currently exactly
    basically possible able such much many own same lot bit kind sort using via per not never no none neither nor
    cannot without nobody nothing except vs versus within during through across only take give look try mean tell
    show explain describe summarise question wonder think find see each every all both other another more most less
    least even still yet since until unless after before once whether though although well make sure
    etc eg ie""".split()
)

# Kept words of greetings, thanks and reasons for asking; a sentence of nothing else is not looked at.
COURTESY: Final = (
    r"\b(?:hi|hello|hey|dear|good (?:morning|afternoon|evening|day))"
    r"(?: (?:there|all|team|everyone|everybody|support|folks|guys))?\b[,!.]?",
    r"\b(?:many )?(?:thanks|thank you|thx|cheers|best regards|kind regards|regards)(?: (?:a lot|so much|very much"
    r"|in advance))?(?: for [^.!?]*[.!?])?[,!.]?",
    r"\b(?:please|kindly|pls)\b,?",
    r"\bsorry (?:to bother you|if [^,.?!]*)[,.]?(?: but)?",
    r"\b(?:just )?(?:a )?quick question:?",
    r"\bjust to be sure:?",
    r"\bi am new here\b[,.]?",
    r"\bi keep hearing (?:the|this) term\b[,.]?(?: so:?)?",
    r"\b(?:i was|i am|i have been) (?:just )?wondering (?:if|whether)?",
    r"\b(?:can|could|would|will) you (?:please |kindly )?(?:tell|show|help|explain to|give) me(?: with)?\b",
    r"\b(?:can|could|would|will) you (?:please |kindly )?(?=explain|describe|define|summarise|list|write|suggest"
    r"|recommend|translate|point|name)",
    r"\b(?:may|can|could) i ask\b",
    r"\b(?:i would like|i want|i need|i wish|i am trying|i am hoping) to (?:know|find out|understand|learn)"
    r"(?= (?:how|what|why|when|where|who|which|whether|if)\b)",
    r"\b(?:i |we |and )do not (?:know|understand|see|get)(?= (?:how|what|why|when|where|who|which|whether|if)\b)",
    r"\bi do not understand\b",
    r"\b(?:do|can) you (?:happen to )?know(?= (?:how|what|why|when|where|who|which|whether|if)\b)",
    r"\bpoint me to\b",
    r"\btell me\b(?= (?:how|what|why|when|where|who|which|whether|if|the)\b)",
    r"\b(?:for|to) me\b(?=[.?!: ]*$)",
    r"\bneed help(?: with)?\b",
)

# Small words by language; each list has some that the others have not.
LANGUAGES: Final = {
    "en": frozenset(
        """the of is and how what my i do to in for are can does it with on you not an be which why when where from this
        that without at we our who should have there""".split()
    ),
    "de": frozenset(
        "der die das ist und wie was ich mein meine nicht ein eine zu mit für sind kann wo warum wird den auf".split()
    ),
    "fr": frozenset(
        "le la les est et comment que quelle quel je mon ma mes pas un une des pour avec sont où pourquoi du en".split()
    ),
    "es": frozenset(
        "el los las es y cómo qué mi mis puedo dónde por para con están está una un del cuánto cuál no se mi".split()
    ),
    "it": frozenset(
        "il lo gli è e come che cosa posso mio mia non un una per con sono dove perché della del quanto".split()
    ),
    "pt": frozenset("o os as é e como que meu minha não um uma para com são onde por quanto do da posso".split()),
    "nl": frozenset("de het is en hoe wat ik mijn niet een van voor met zijn kan waar waarom naar op hoeveel".split()),
}
