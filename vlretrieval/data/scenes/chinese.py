"""Chinese sentences for queries: the second grammar, for the same meanings as ``english``."""

from functools import cache

from vlretrieval.data.scenes.query import Query, Thing
from vlretrieval.data.scenes.vocabulary import ANY
from vlretrieval.data.scenes.wording import mark

_NUMBERS = ("零", "一", "两", "三", "四", "五", "六", "七", "八")
# Noun and measure word, as SHAPES; then the word for any shape.
_NOUNS = (
    ("圆", "个"), ("正方形", "个"), ("三角形", "个"), ("星星", "颗"), ("十字", "个"), ("菱形", "个"),
    ("圆环", "个"), ("爱心", "颗"), ("月牙", "弯"), ("箭头", "个"), ("图形", "个"),
)  # fmt: skip
_COLOURS = ("红色", "绿色", "蓝色", "黄色", "紫色", "橙色", "黑色", "粉色", "棕色", "青色")
_SIZES = ("小", "大")
_PLACES = ("左上角", "右上角", "左下角", "右下角", "正中间", "上部", "下部", "左侧", "右侧")
_RELATIONS = (("左边", "右边", "上面", "下面"), ("左侧", "右侧", "上方", "下方"))

_LISTS = (
    "{L}。", "图片里有{L}。", "画面中有{L}。", "可以看到{L}。", "这张图画着{L}。", "一张画有{L}的图片。",
    "图中出现了{L}。", "这里有{L}。",
)  # fmt: skip
_BARE_LIST = len(_LISTS)
_ONLY = (
    "只有{L}。", "图片里只有{L}。", "{L}，此外什么都没有。", "画面中仅有{L}。", "除了{L}，图中没有别的东西。",
    "一共有{n}：{L}。", "能看到的只有{L}。",
)  # fmt: skip
_STANDING = (
    "{A}在{B}的{r}{C}。", "{A}位于{B}的{r}{C}。", "{B}的{r}有{A}{C}。", "图片里，{A}在{B}的{r}{C}。",
    "可以看到{A}在{B}的{r}{C}。", "在{B}的{r}，有{A}{C}。", "画面中{B}的{r}是{A}{C}。",
)  # fmt: skip
_PLACED = (
    "{A}在{p}{C}。", "{A}位于图片的{p}{C}。", "{p}有{A}{C}。", "图片的{p}有{A}{C}。", "这张图的{p}是{A}{C}。",
    "可以看到{p}有{A}{C}。", "在画面的{p}，有{A}{C}。",
)  # fmt: skip


@cache
def phrase(thing: Thing, bare: bool = False) -> str:
    """ "一颗红色的小星星"、"两个圆"; bare leaves out 一 and its measure word: "红色的小星星"."""
    noun, measure = _NOUNS[thing.shape]  # ANY = -1 is the last: 图形
    colour = f"{_COLOURS[thing.colour]}的" if thing.colour != ANY else ""
    size = _SIZES[thing.size] if thing.size != ANY else ""
    number = "" if bare and thing.quantity == 1 else _NUMBERS[thing.quantity] + measure
    return f"{number}{colour}{size}{noun}"


def joined(phrases: list[str]) -> str:
    """ "甲"、"甲和乙"、"甲、乙和丙"."""
    return phrases[0] if len(phrases) == 1 else f"{'、'.join(phrases[:-1])}和{phrases[-1]}"


def render(query: Query, form: int, marked: bool = False) -> str:
    """The query as a sentence; the arguments are those of ``english.render``."""
    things = query.things
    placed = things[0].place != ANY
    bare = query.relation == ANY and not placed and not query.exhaustive and form % (len(_LISTS) + 1) == _BARE_LIST
    said = [phrase(thing, bare) for thing in things]
    if marked:
        said = [mark(words, number) for number, words in enumerate(said)]
    if query.relation != ANY:
        variant = form // len(_STANDING) % len(_RELATIONS)
        sentence = _STANDING[form % len(_STANDING)].replace("{r}", _RELATIONS[variant][query.relation])
        also = f"，还有{said[2]}" if len(said) > 2 else ""
        return sentence.replace("{A}", said[0]).replace("{B}", said[1]).replace("{C}", also)
    if placed:
        sentence = _PLACED[form % len(_PLACED)].replace("{p}", _PLACES[things[0].place])
        also = "".join(
            f"，{words}在{_PLACES[thing.place]}" if thing.place != ANY else f"，还有{words}"
            for thing, words in zip(things[1:], said[1:], strict=True)
        )
        return sentence.replace("{A}", said[0]).replace("{C}", also)
    if bare:
        return joined(said)
    if query.exhaustive:
        return _ONLY[form % len(_ONLY)].replace("{n}", f"{_NUMBERS[query.total]}个图形").replace("{L}", joined(said))
    return _LISTS[form % (len(_LISTS) + 1)].replace("{L}", joined(said))
