"""What a library is made of and how fast each part is, as one value, as JSON and as a page of HTML.

- ``facts.py``: the value; ``schema.json`` describes its JSON;
- ``gather.py``: a library's metadata -> facts; ``measured.py`` adds times, ``compiled.py`` what a
  compile knows; ``bounds.py`` and ``words.py`` say what they mean;
- ``difference.py``: the facts of two libraries, stage by stage;
- ``page.py``: facts -> HTML, with ``graph.py``, ``charts.py`` and ``roofline.py`` for the pictures.

The page needs the packages of the extra ``report``; the JSON needs none of them.
"""
