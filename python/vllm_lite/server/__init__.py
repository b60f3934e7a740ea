"""The HTTP server: OpenAI's routes, Anthropic's messages, and vLLM's own.

Nothing in here imports torch or a model.

Where OpenAI and vLLM differ or say nothing, this server does the following.

* ``max_completion_tokens`` wins over ``max_tokens``, on both endpoints. Left out: 16 for
  completions, what is left of the context for chat. A length that was asked for must fit; a default
  is cut.
* Refused values give 400 (never 422) with the field in ``param``. Values are not clamped. Known
  fields that are not supported are refused by name, unless null or "off"; unknown ones are
  ignored.
* Log-probabilities that are not finite are sent as -9999.0. ``text_offset`` counts from the
  choice's own first character. A map of alternatives keeps the likelier of two tokens with one
  text.
* Text parts of a message are joined by newlines; parts of any other type are refused.
* Responses and messages become a chat request, and keep nothing.
* An engine error inside a stream is its last event, ``{"error": ...}``; no ``[DONE]`` follows, and
  no ``finish_reason`` was sent for the choices that it cut short.
* ``X-Request-Id``: at most 128 characters of ``A-Za-z0-9._:+=@/-``, else 400; sent back in the
  answer's header. Ids in bodies are the server's own, or made of ``request_id``.
* The API key is needed on every path but ``/health``, unknown paths included.
"""
