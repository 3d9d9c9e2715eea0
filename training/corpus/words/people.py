"""Names of people that the corpus is filled with: first names and last names of many countries.

Owns the lists. Does not know who is named where.
"""

from __future__ import annotations

FIRST_NAMES = """
Ada Agnes Ahmed Aisha Alan Alma Amir Amy Ana Anders Anna Anton Arjun Astrid Bella Ben Bilal Boris Bruno Carla Carlos
Cem Chloe Clara Daniel Daria David Diego Dina Elena Elias Ella Emma Erik Eva Farid Felix Fiona Frank Gita Grace Greta
Hana Hassan Helen Hugo Ida Igor Ines Iris Ivan Jack Jana Jonas Julia Karim Kate Kenji Lara Laura Lea Leo Lina Louis
Lucas Lucy Maja Marco Maria Mark Marta Max Maya Mei Mila Mina Nadia Nina Noah Nora Oleg Olga Omar Oscar Paul Petra
Priya Rafael Ravi Rosa Ruth Sam Samir Sara Sofia Stefan Tara Theo Tom Uma Vera Victor Wei Yara Yusuf Zoe
""".split()

LAST_NAMES = """
Abbas Adams Ahlberg Alvarez Baker Bauer Becker Bell Berg Bianchi Blake Bose Brandt Brooks Carter Castro Chen Clark
Cohen Costa Cruz Dahl Diaz Dixon Doyle Duarte Evans Faber Ferrari Fischer Fox Frost Garcia Gill Gomez Grant Gray Green
Gupta Haas Hall Hansen Hart Hill Holm Hughes Ito Jansen Jensen Kaur Keller Khan Kim Klein Kowalski Kumar Lang Larsen
Lee Lopez Lund Marino Martin Meyer Mills Mori Moore Nagy Nguyen Novak Nowak Okafor Olsen Ortiz Park Patel Perez Peters
Popov Price Quinn Ramos Reed Reyes Rossi Roy Sato Shah Silva Singh Stone Suzuki Tanaka Torres Vega Vogel Wagner Walsh
Ward Weber West Winter Wolf Wong Young Zhang
""".split()
