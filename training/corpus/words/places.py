"""Names of places that the corpus is filled with: cities, countries, streets and rooms.

Owns the lists. Does not know what happens where.
"""

from __future__ import annotations

CITIES = """
Amsterdam Athens Auckland Austin Barcelona Berlin Bergen Bern Boston Brussels Budapest Cairo Chicago Cork Dallas Denver
Dublin Florence Geneva Ghent Glasgow Hamburg Helsinki Istanbul Jakarta Kyoto Lagos Leeds Lima Lisbon London Lyon Madrid
Malta Manila Milan Montreal Mumbai Munich Nairobi Naples Nice Osaka Oslo Paris Porto Prague Quebec Riga Rome Rotterdam
Seoul Seville Sofia Stockholm Sydney Tallinn Tokyo Toronto Turin Utrecht Valencia Venice Vienna Vilnius Warsaw York
Zagreb Zurich
""".split()

STREETS = """
Abbey Bridge Canal Castle Chapel Cherry Church College Garden Harbour High King Lake Lime Market Meadow Mill North Oak
Orchard Park Queen River School South Station Temple Tower Union Water
""".split()

STREET_KINDS = "Street Road Lane Square".split()

ROOMS = """
Alder Aspen Birch Cedar Cypress Elm Hazel Juniper Larch Linden Maple Olive Pine Poplar Rowan Spruce Walnut Willow
""".split()
