"""Functions that exist on paper: their parameters, and requests that need them. Pure data and its drawing.

Called by the problem maker.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Values = tuple[Any, ...]
_CITIES = ("Oslo", "Lima", "Quebec", "Nairobi", "Kyoto", "Porto", "Tallinn", "Hanoi")
_NAMES = ("Ada", "Bo", "Chen", "Dara", "Edin", "Farah")

# name -> (description, request in words, parameters with the values that they are drawn from)
CATALOG: Mapping[str, tuple[str, str, dict[str, Values]]] = MappingProxyType(
    {
        "get_weather": (
            "Weather of a city",
            "Tell me the weather in {city} in {unit}.",
            {"city": _CITIES, "unit": ("celsius", "fahrenheit")},
        ),
        "set_timer": ("Start a timer", "Set a timer of {minutes} minutes.", {"minutes": tuple(range(1, 120))}),
        "convert": (
            "Convert money",
            "Convert {amount} {source} to {target}.",
            {"amount": tuple(range(5, 500, 5)), "source": ("EUR", "USD"), "target": ("JPY", "GBP", "SEK")},
        ),
        "send_message": (
            "Send a text message",
            'Send the message "{text}" to {recipient}.',
            {"text": ("on my way", "call me", "happy birthday", "see you soon"), "recipient": _NAMES},
        ),
        "book_table": (
            "Book a table in a restaurant",
            "Book a table for {people} at {hour} o'clock in {city}.",
            {"people": tuple(range(1, 9)), "hour": tuple(range(17, 23)), "city": _CITIES},
        ),
        "switch_light": (
            "Switch a light on or off",
            "Switch the light in the {room} to {state}.",
            {"room": ("kitchen", "hall", "office", "garage"), "state": ("on", "off")},
        ),
        "find_train": (
            "Trains between two cities",
            "Find a train from {start} to {end}.",
            {"start": _CITIES[:4], "end": _CITIES[4:]},
        ),
    }
)


def tool_schema(name: str) -> dict[str, Any]:
    """Return the function in OpenAI's format."""
    description, _, parameters = CATALOG[name]
    properties = {
        key: {"type": "integer" if isinstance(values[0], int) else "string"} for key, values in parameters.items()
    }
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def draw_call(name: str, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a request in words and the arguments that answer it."""
    _, request, parameters = CATALOG[name]
    arguments = {key: rng.choice(values) for key, values in parameters.items()}
    return request.format(**arguments), arguments
