"""Lists English words by how often ordinary text uses them, and inflects them, for the synthetic tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

FUNCTION_WORDS = """
the of and to a in is that it was for on with as be he at by this his had not are but from or have an they which one
were you her all she there would their we him been has when who will more no if out so said what up its about into than
them can only other new some could time these two may then do first any my now such like our over me even most made
after also did many before must through back years where much your way well down should because each just those people
how too little very make still own see men work long get here between both life being under never day same another know
while last might us great old year off come since against go came right used take three states himself few house use
during without again place around however home small found thought went say part once general high upon school every
don does got united left number course war until always away something fact though water less public put thing almost
hand enough far took head yet government system better set told nothing night end why called eyes find going look asked
later knew let toward days next given several whether
""".split()

VERBS = """
make take work ask need feel become leave call try provide include continue set learn change lead understand watch
follow stop create speak read allow add spend grow open walk offer remember love consider appear wait serve die send
expect build stay fall cut reach kill remain suggest raise pass sell require report decide pull return explain hope
develop carry break receive agree support hit produce eat cover catch draw choose cause point listen realize place
close involve increase wonder keep start play run move live believe hold bring happen write sit stand lose pay meet
turn want look help show hear talk seem begin plan test store measure compute predict train sample load stream answer
question describe discuss design define compare contain connect collect cook clean climb check charge claim control
copy count cross dance deal deliver deny depend destroy determine discover drink drive drop earn encourage enjoy enter
escape establish examine exist express face fail fight fill finish fit fix fly force forget form gain gather give guess
handle hang hate hide hunt identify imagine improve indicate influence inform introduce invent join jump kick knock
laugh lay let lie lift limit link lock manage mark match mean mention mind miss name note notice number obtain occur
order own pick plant pour prefer prepare present press prevent print process promise protect prove push put ride ring
rise roll rule save search select share shout shut sing sleep smile solve sort sound spread step study succeed suffer
supply suppose surprise surround teach tell thank think throw touch trade travel treat trust use visit vote warn wash
wear win wish
""".split()

NOUNS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information back parent face other
level office door health person art war history party result change morning reason research girl guy moment air teacher
force education language model token engine server memory cache request answer machine data file network wheel river
stream channel mill stone bridge mountain valley forest garden field farm village town road street corner market shop
price cost value weight length width height size shape colour light sound voice music song letter paper page list table
chair window wall floor roof kitchen bed clock picture image film camera phone radio computer screen key code function
class object method number matrix vector product layer attention block batch queue thread process kernel core chip disk
heart blood bone skin hair mouth nose ear arm leg foot finger tooth brain mind dream thought feeling pain pleasure fear
anger joy hope peace truth lie secret promise plan rule order test game race ball goal prize gift card box bag bottle
cup glass plate knife spoon bread butter cheese meat fish fruit apple orange sugar salt tea coffee milk wine beer meal
dinner dog cat horse cow pig sheep bird chicken tree leaf flower grass seed root branch wood fire smoke ash dust sand
rock hill sea ocean lake island beach coast shore wave wind rain snow ice storm cloud sky sun moon star earth planet
space ship boat train bus plane wing motor tool hammer nail rope chain metal iron steel gold silver copper glass
plastic cloth shirt coat hat shoe sock ring watch pocket button king queen prince lord lady knight soldier army battle
sword gun enemy hero doctor nurse patient hospital medicine disease science theory experiment energy electricity gas
oil coal field wire judge court crime police prison thief lawyer evidence witness bank account tax budget trade
industry factory worker farmer driver writer artist singer player actor leader manager owner customer guest neighbour
stranger husband wife brother sister son daughter baby uncle aunt cousin summer winter spring autumn season century
decade date event accident
""".split()

ADJECTIVES = """
good new great old big small large long young high low early late different important public bad able full free special
clear certain hard easy strong possible whole real simple quick slow warm cold hot cool dark bright soft loud quiet
deep wide narrow short thin thick heavy light empty rich poor cheap dear sweet sour fresh clean dirty dry wet safe
dangerous happy sad angry calm kind cruel brave proud ready careful common rare strange natural normal usual local
national foreign modern ancient recent current past final main single double equal similar same major minor exact rough
smooth sharp flat round square straight wild gentle honest fair wise clever foolish busy lazy tired sick healthy alive
dead beautiful ugly perfect useful helpful serious active nervous famous private human social political economic
medical legal red green blue yellow black white brown grey open closed random fast
""".split()

OTHER_WORDS = """
above across ago ahead along already although am among anyone anything apart aside became began behind below beside
best beyond bought brought built cannot caught certainly chosen close done either else especially everyone everything
exactly except fell felt finally five forward four front further gave gone grew half happened heard held herself
hundred indeed inside instead itself kept known least led lost maybe meant million mostly myself near nearly neither
nine none nor often ones onto others ought ourselves outside per perhaps quite rather really said sat saw second seen
seven shall shown six someone sometimes somewhere soon spent spoken stood taken ten themselves therefore third thousand
throughout thus today together tomorrow tonight towards twelve twenty understood unless usually various went whatever
whenever wherever whose within won written wrote yes yesterday yourself hello please thanks okay sorry example answer
user assistant system tool role content name type string number true false null json http import return class self
print error value list index file path
""".split()

SUFFIXES = """
s ed ing er ers ly ness less ful able ment ments tion tions ation ations ity ities ive al ally ous ism ist ists ic ical
ize ized ization ise ised isation ward wards ship hood dom land lands man men work works house side line way time room
book board ball light fall stone field water wood yard port town shire ford burg berg son sen ton ville like wise proof
""".split()

PREFIXES = (
    "un re in im dis over under out pre pro sub inter trans con com de ex mis non anti auto counter micro".split()
)

VOWELS = frozenset("aeiou")


def with_ending(word: str, ending: str) -> str:
    """Add an ending that begins with a vowel: make, making; try, tried; stop, stopping."""
    if word.endswith("e") and not word.endswith(("ee", "oe", "ye")):
        return word[:-1] + ending
    if word.endswith("y") and word[-2:-1] not in VOWELS and not ending.startswith("i"):
        return word[:-1] + "i" + ending
    if len(word) == 3 and word[1] in VOWELS and word[0] not in VOWELS and word[2] not in VOWELS | set("wxy"):
        return word + word[-1] + ending
    return word + ending


def plural(word: str) -> str:
    if word.endswith(("s", "x", "z", "ch", "sh")):
        return word + "es"
    if word.endswith("y") and word[-2:-1] not in VOWELS:
        return word[:-1] + "ies"
    return word + "s"


def stem(word: str) -> str:
    """Return the form before an ending that begins with a consonant: happy, happi-ness."""
    return word[:-1] + "i" if word.endswith("y") and len(word) > 3 else word


def adverb(word: str) -> str:
    return word[:-1] + "y" if word.endswith("le") else stem(word) + "ly"


def inflected() -> Iterator[tuple[str, int]]:
    """Yield words with rough counts in half a million words of text. A word may occur more than once."""
    for rank, word in enumerate(FUNCTION_WORDS):
        yield word, 60_000 // (rank + 2)
    for word in OTHER_WORDS:
        yield word, 90
    for rank, word in enumerate(NOUNS):
        count = 200 - 150 * rank // len(NOUNS)
        yield word, count
        yield plural(word), count // 2
    for rank, word in enumerate(VERBS):
        count = 180 - 130 * rank // len(VERBS)
        yield word, count
        yield plural(word), count // 2
        yield with_ending(word, "ed"), count // 2
        yield with_ending(word, "ing"), count // 2
        yield with_ending(word, "er"), count // 8
    for word in ADJECTIVES:
        yield word, 120
        yield adverb(word), 40
        yield stem(word) + "ness", 6
        if len(word) < 7:
            yield with_ending(word, "er"), 20
            yield with_ending(word, "est"), 15
