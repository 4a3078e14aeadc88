"""A query's text to its syntax tree: SELECT lists, tables, joins and sub-queries, with a position for all of it.

sqlglot makes the tokens. The clauses are read here, after Spark's own grammar (SqlBaseParser.g4): sqlglot's parser
keeps the positions of some nodes only, and every refusal has to say where. What stands inside an expression is
left as a span of tokens: `gpu_ops.query.predicates` and `gpu_ops.query.names` look into it.
"""

from __future__ import annotations

from typing import Final, NoReturn

from gpu_ops.conditions.tokens import Token
from gpu_ops.query import refused
from gpu_ops.query.errors import fail
from gpu_ops.query.operands import CONTINUES, ends_operand
from gpu_ops.query.syntax import How, Item, JoinClause, Relation, Select, Source, Span, SubTable, TableName

_JOINS: Final[dict[str, How]] = {
    "JOIN": "inner", "INNER": "inner", "LEFT": "left", "RIGHT": "right", "FULL": "full", "CROSS": "inner",
    "SEMI": "semi", "ANTI": "anti",
}  # fmt: skip
_AFTER_SIDE: Final = {"JOIN", "OUTER", "SEMI", "ANTI"}
_NO_ALIAS: Final = {
    *_JOINS, *refused.CLAUSES, "OUTER", "ON", "USING", "NATURAL", "WHERE", "SELECT", "FROM", "WITH", "SET", "AS",
    "LATERAL", "BY", "AND", "OR", "NOT",
}  # fmt: skip


def read(sql: str) -> tuple[Source, Select]:
    """The syntax tree of a query.

    Raises:
        SqlError: no query, or one with something that streaming joins cannot do; with the position.
    """
    source = Source.of(sql)
    reader = Reader(source, 0, len(source.tokens) - 1)
    reader.refuse_start()
    try:
        query = reader.query()
    except RecursionError:
        reader.fail("the query is nested too deeply", reader.token)
    while reader.match(";"):
        pass
    if reader.token.kind != "end":
        if source.tokens[reader.at - 1].text == ";":
            reader.fail("several statements: sql() takes one query", reader.token)
        reader.unexpected("the end of the query")
    return source, query


class Reader:
    """Reads clauses from the tokens ``at`` up to ``stop``."""

    def __init__(self, source: Source, at: int, stop: int) -> None:
        self.source, self.at, self.stop = source, at, stop
        self._end = Token("end", "", source.tokens[stop].start, source.tokens[stop].start)

    # --- tokens ---------------------------------------------------------------------------------

    @property
    def token(self) -> Token:
        """The next token."""
        return self.source.tokens[self.at] if self.at < self.stop else self._end

    @property
    def word(self) -> str:
        """The next word or symbol in upper case."""
        return self.source.word(self.at) if self.at < self.stop else ""

    def after(self, count: int = 1) -> str:
        """The word so many tokens on."""
        return self.source.word(self.at + count) if self.at + count < self.stop else ""

    def match(self, *words: str) -> Token | None:
        """Take the next token if it is one of these."""
        if self.word not in words or not self.word:
            return None
        self.at += 1
        return self.source.tokens[self.at - 1]

    def expect(self, *words: str) -> Token:
        """Take the next token, which is one of these."""
        return self.match(*words) or self.unexpected(" or ".join(words))

    def fail(self, message: str, at: Token) -> NoReturn:
        """SqlError at a token."""
        fail(self.source.sql, message, at.start)

    def unexpected(self, wanted: str) -> NoReturn:
        """SqlError: something else was expected here; a known clause is refused in its own words."""
        why = refused.clause(self.word, self.after())
        self.fail(why or f"expected {wanted}, found {self.token.shown}", self.token)

    def name(self, what: str) -> Token:
        """Take a name."""
        token = self.token
        if token.kind not in ("word", "quoted") or (token.kind == "word" and not token.text[0].isidentifier()):
            self.unexpected(what)
        self.at += 1
        return token

    # --- clauses --------------------------------------------------------------------------------

    def refuse_start(self) -> None:
        """Something that is no query."""
        if self.token.kind == "end":
            self.fail("the query is empty", self.token)
        if self.word not in ("SELECT", "WITH", "(", "FROM", "VALUES", "TABLE"):
            why = refused.STATEMENTS.get(self.word, "sql() takes a query, SELECT ... FROM ... JOIN ...")
            self.fail(f"expected SELECT, found {self.token.shown}: {why}", self.token)

    def query(self) -> Select:
        """A SELECT with its WITH, parenthesised or not."""
        if self.word == "(" and self.after() in ("SELECT", "WITH", "("):
            self.at += 1
            found = self.query()
            self.expect(")")
            return self.alone(found)
        ctes = self.ctes() if self.match("WITH") else ()
        if self.word in ("VALUES", "TABLE", "FROM"):
            self.fail(f"{self.word} is no query here: write a SELECT", self.token)
        return self.alone(self.select(ctes))

    def alone(self, query: Select) -> Select:
        """A query after which neither UNION nor ORDER BY nor LIMIT stands."""
        why = refused.clause(self.word, self.after())
        if why is not None:
            self.fail(why, self.token)
        return query

    def ctes(self) -> tuple[tuple[str, tuple[str, ...] | None, Select], ...]:
        """What follows WITH."""
        if self.word == "RECURSIVE":
            self.fail("WITH RECURSIVE is not understood: a streaming join has no fixed point", self.token)
        found: list[tuple[str, tuple[str, ...] | None, Select]] = []
        while True:
            name = self.name("the name of a common table expression")
            if name.text.lower() in [other.lower() for other, _, _ in found]:
                self.fail(f"WITH names {name.text!r} twice", name)
            columns = self.column_names() if self.word == "(" else None
            self.expect("AS")
            self.expect("(")
            query = self.query()
            self.expect(")")
            found.append((name.text, columns, query))
            if not self.match(","):
                return tuple(found)

    def select(self, ctes: tuple[tuple[str, tuple[str, ...] | None, Select], ...]) -> Select:
        """From SELECT to the end of WHERE."""
        start = self.expect("SELECT")
        if self.token.text.startswith("/*+"):
            self.fail("hints are not understood: say multi_way= or partitions= to sql() instead", self.token)
        distinct = self.match("DISTINCT")
        if distinct is None and self.word == "ALL" and self.after() not in (",", "FROM", "."):
            self.at += 1
        items = [self.item()]
        while self.match(","):
            items.append(self.item())
        if not self.match("FROM"):
            if self.token.kind == "end" or self.word == ")":
                self.fail("the query has no FROM: it joins nothing", self.token)
            self.unexpected("',' or FROM")
        relation = self.relations()
        where = None
        if self.match("WHERE"):
            where = self.expression("a condition after WHERE", in_list=False)
        return Select(tuple(items), relation, where, ctes, distinct.start if distinct else None, start.start)

    def item(self) -> Item:
        """One entry of the SELECT list."""
        first, token = self.at, self.token
        while self.token.kind in ("word", "quoted") and self.after() == ".":
            self.at += 2
        if self.match("*"):
            span = Span(first, max(first, self.at - 2))
            if self.word in ("EXCEPT", "REPLACE", "EXCLUDE", "RENAME"):
                self.fail(f"* {self.word} is not understood: list the columns", self.token)
            return Item(span, None, star=True, at=token.start)
        self.at = first
        span = self.expression("an expression", in_list=True)
        alias = self.name("a name after AS") if self.match("AS") else None
        if alias is None and self.token.kind in ("word", "quoted") and self.word not in ("FROM", *refused.CLAUSES):
            alias = self.name("a name")
        return Item(span, alias.text if alias else None, star=False, at=token.start)

    def expression(self, what: str, *, in_list: bool) -> Span:
        """The tokens of an expression; in a SELECT list it ends before an alias, too."""
        first, depth, cases = self.at, 0, 0
        while self.token.kind != "end":
            word, token = self.word, self.token
            if depth == 0 and cases == 0:
                operand = self.at > first and ends_operand(self.source, self.at - 1)
                if word in (",", ")", ";") or self.ends_expression(word):
                    break
                starts = token.kind in ("word", "quoted") and word not in CONTINUES and self.source.word(self.at) != ""
                if in_list and operand and (word == "AS" or (starts or token.kind == "quoted")):
                    break
            if word in ("(", "[", "{"):
                depth += 1
            elif word in (")", "]", "}"):
                depth -= 1
                if depth < 0:
                    break
            elif word == "CASE":
                cases += 1
            elif word == "END" and cases:
                cases -= 1
            self.at += 1
        if depth > 0:
            opened = self.source.tokens[first : self.at]
            self.fail("a parenthesis is opened here and not closed", _unclosed(opened))
        if self.at == first:
            self.unexpected(what)
        return Span(first, self.at)

    def ends_expression(self, word: str) -> bool:
        """Whether an expression ends before this word."""
        following = self.after()
        if word == "FROM":
            return self.source.word(self.at - 1) != "DISTINCT"
        if word in ("LEFT", "RIGHT", "FULL", "SEMI", "ANTI"):
            return following in _AFTER_SIDE
        if word in ("INNER", "CROSS", "NATURAL"):
            return following in {"JOIN", "INNER", "LEFT", "RIGHT", "FULL"}
        if word in ("JOIN", "WHERE", "ON", "USING"):
            return True
        return refused.clause(word, following) is not None

    # --- relations ------------------------------------------------------------------------------

    def relations(self) -> Relation:
        """What follows FROM."""
        relation = self.joined()
        while comma := self.match(","):
            relation = JoinClause(relation, self.joined(), "inner", None, (), comma.start, comma=True)
        return relation

    def joined(self) -> Relation:
        """A relation and its JOINs."""
        relation = self.relation()
        while self.word in (*_JOINS, "NATURAL") and (self.word == "JOIN" or self.ends_expression(self.word)):
            relation = self.join(relation)
        return relation

    def join(self, left: Relation) -> JoinClause:
        """One JOIN clause."""
        start = self.token
        if self.match("NATURAL"):
            self.fail(
                "NATURAL JOIN is not understood: a new column would change it silently. "
                "Name the columns: JOIN ... USING (k)",
                start,
            )
        word = self.word
        how, cross = _JOINS[word], word == "CROSS"
        if word != "JOIN":
            self.at += 1
            if word in ("LEFT", "RIGHT", "FULL") and self.word in ("SEMI", "ANTI"):
                if word != "LEFT":
                    self.fail(f"there is no {word} {self.word} JOIN: put that table on the left", start)
                how = _JOINS[self.word]
                self.at += 1
            elif word in ("LEFT", "RIGHT", "FULL"):
                self.match("OUTER")
        self.expect("JOIN")
        right = self.relation()
        on: Span | None = None
        using: tuple[Token, ...] = ()
        if self.match("ON"):
            on = self.expression("a condition after ON", in_list=False)
        elif self.match("USING"):
            using = self.using()
        elif not cross and how != "inner":
            self.fail(f"{' '.join(_spoken(how))} JOIN has no condition: write ON ... or USING (...)", start)
        if cross and (on is not None or using):
            self.fail("CROSS JOIN takes no condition: write JOIN ... ON, or put it into WHERE", start)
        return JoinClause(left, right, how, on, using, start.start)

    def using(self) -> tuple[Token, ...]:
        """The columns of USING."""
        self.expect("(")
        found = [self.name("a column")]
        while self.match(","):
            found.append(self.name("a column"))
        self.expect(")")
        return tuple(found)

    def relation(self) -> Relation:
        """A table, a sub-query, or joins in parentheses."""
        start = self.token
        if self.word == "LATERAL":
            self.fail("LATERAL is not understood: explode() the column in Spark first, and join what that gives", start)
        if self.word in ("VALUES", "UNNEST") or (self.word == "TABLE" and self.after() == "("):
            self.fail(f"{self.word} is no table here: give a DataFrame as an input of sql()", start)
        if self.match("("):
            if self.word in ("SELECT", "WITH") or (self.word == "(" and self.after() in ("SELECT", "WITH")):
                query = self.query()
                self.expect(")")
                alias, columns = self.alias()
                return SubTable(query, alias, columns, start.start)
            relation = self.relations()
            self.expect(")")
            if self.word == "AS" or self.token.kind == "quoted":
                self.fail("joins in parentheses take no alias: write (SELECT ... FROM ...) AS name", self.token)
            return relation
        token = self.name("a table")
        if self.match("."):
            self.fail(
                f"{token.text}.{self.token.text} is a table of a catalog: give it as an input of sql(), "
                f"{self.token.text}=spark.readStream.table(...)",
                token,
            )
        if self.word == "(":
            self.fail(f"{token.text}(...) is a table function: apply it in Spark first, and join what it gives", token)
        alias, columns = self.alias()
        return TableName(token.text, alias or token.text, columns, token.start)

    def alias(self) -> tuple[str | None, tuple[str, ...] | None]:
        """``[AS] name [(columns)]``."""
        if self.word in ("FOR", "VERSION", "TIMESTAMP") and self.after() in ("SYSTEM_TIME", "SYSTEM_VERSION", "AS"):
            self.fail(
                "a temporal join (FOR SYSTEM_TIME AS OF) is not built: a regular join with the newest row per key "
                "(stream(..., unique_key=...)) keeps the result up to date instead",
                self.token,
            )
        given = self.match("AS")
        token = self.token
        if token.kind not in ("word", "quoted") or (token.kind == "word" and not given and self.word in _NO_ALIAS):
            if given:
                self.unexpected("a name after AS")
            return None, None
        self.at += 1
        if not given and token.kind == "word":
            self.refuse_modifier(token)
        return token.text, self.column_names() if self.word == "(" else None

    def refuse_modifier(self, token: Token) -> None:
        """SqlError: a word that can be another name of the table before it, or be meant for a part of the query.

        It is a name if something is named with it; no word that means something else is as short as ``o`` or ``t1``.
        """
        word = token.text.upper()
        tokens = self.source.tokens
        if any(
            name.kind in ("word", "quoted") and name.text.upper() == word and tokens[at + 1].text == "."
            for at, name in enumerate(tokens[:-1])
        ):
            return
        joins = self.word in (*_JOINS, "NATURAL") and (self.word == "JOIN" or self.ends_expression(self.word))
        rather = f"if it is another name of the table, write AS {token.text}"
        if joins and word in refused.JOIN_WORDS:
            self.fail(f"{word} JOIN is not understood; {rather}", token)
        if joins and len(word) > 2:
            self.fail(f"{token.text!r} before JOIN is no kind of join, and no column is named with it; {rather}", token)
        if word in refused.TABLE_WORDS:
            self.fail(f"{word} is not understood; {rather}", token)

    def column_names(self) -> tuple[str, ...]:
        """New names for columns, in parentheses."""
        return tuple(token.text for token in self.using())


def _unclosed(tokens: tuple[Token, ...]) -> Token:
    opened: list[Token] = []
    for token in tokens:
        if token.kind == "symbol" and token.text in ("(", "[", "{"):
            opened.append(token)
        elif token.kind == "symbol" and token.text in (")", "]", "}") and opened:
            opened.pop()
    return opened[-1]


def _spoken(how: How) -> list[str]:
    return {"semi": ["LEFT", "SEMI"], "anti": ["LEFT", "ANTI"]}.get(how, [how.upper()])
