"""Names of things that the corpus is filled with: companies, products, programs, services, teams, goods.

Owns the lists. All companies and products are made up.
"""

from __future__ import annotations

COMPANIES = """
Acorn Anchor Argo Beacon Borealis Brightline Cobalt Corvus Delta Ember Falcon Fjord Granite Harbor Helix Horizon Indigo
Juno Kestrel Lantern Lumen Meridian Mosaic Nimbus Northwind Nova Onyx Orchid Orion Pebble Pioneer Polar Quartz Raven
Redwood Sable Sierra Solaris Summit Tempo Tidewater Umbra Vertex Westbrook Zephyr
""".split()

COMPANY_KINDS = "Foods Labs Logistics Media Motors Systems Textiles Tools".split()

PROGRAMS = """
Atlas Basil Bolt Cinder Comet Copper Drift Echo Flint Garnet Glacier Harvest Ivory Jade Lark Magnet Maple Mercury Mint
Nectar Opal Otter Pepper Prism Quill Rocket Saffron Sparrow Tango Topaz Velvet Willow
""".split()

SERVICES = """
login payment search billing checkout upload export e-mail calendar chat video backup report catalogue profile invoice
booking notification
""".split()

TEAMS = """
sales support finance design platform security legal data mobile research marketing training operations hardware
""".split()

GOODS = """
lamps chairs desks shelves monitors keyboards cables printers batteries headsets tablets cameras boxes bottles blankets
towels notebooks folders plants mugs tents gloves helmets pumps
""".split()

THINGS = """
lamp chair desk shelf monitor keyboard cable printer battery headset tablet camera kettle toaster blanket suitcase
notebook bicycle plant mug tent jacket helmet pump
""".split()

COLOURS = "black blue brown green grey orange red white yellow purple".split()
