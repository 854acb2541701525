"""One self-contained HTML page from result files.

| module | holds |
|---|---|
| ``collect`` | result files and folders -> what the page shows |
| ``strips`` | a receipt -> the blocks of the context strip |
| ``page`` | the data, the style and the script as one file |
| ``page.html``, ``page.css``, ``page.js``, ``charts.js`` | the page itself |
| ``command`` | ``leyline-evals report`` |
"""
