"""Methods of dicts, lists and functions whose contents are known."""

from .values import UNKNOWN, Const, Mapping, Sequence, bound


class Containers:
    """Mixin of the interpreter: `on_<type of the owner>_<method>`."""

    def on_Mapping_update(self, owner, positional, keywords, whole):
        for other in positional:
            if isinstance(other, Mapping):
                owner.items.update(other.items)
                owner.open = owner.open or other.open
            else:
                owner.open = True
        owner.items.update(keywords)
        owner.open = owner.open or not whole
        return Const(None)

    def on_Mapping_get(self, owner, positional, keywords, whole):
        key = positional[0] if positional else UNKNOWN
        if not isinstance(key, Const) or owner.open:
            return UNKNOWN
        default = positional[1] if positional[1:] else Const(None)
        return owner.items.get(key.value, default)

    def on_Mapping_pop(self, owner, positional, keywords, whole):
        value = self.on_Mapping_get(owner, positional, keywords, whole)
        if positional and isinstance(positional[0], Const) and not self.doubt:
            owner.items.pop(positional[0].value, None)
        return value

    def on_Mapping_setdefault(self, owner, positional, keywords, whole):
        if len(positional) == 2 and isinstance(positional[0], Const):
            return owner.items.setdefault(positional[0].value, positional[1])
        owner.open = True
        return UNKNOWN

    def on_Mapping_copy(self, owner, positional, keywords, whole):
        return Mapping(dict(owner.items), owner.open)

    def on_Mapping_values(self, owner, positional, keywords, whole):
        return Sequence(list(owner.items.values()), owner.open)

    def on_Mapping_items(self, owner, positional, keywords, whole):
        pairs = [Sequence([Const(k), v]) for k, v in owner.items.items()]
        return Sequence(pairs, owner.open)

    def on_Sequence_append(self, owner, positional, keywords, whole):
        if self.doubt or len(positional) != 1:
            owner.open = True
        else:
            owner.items.append(positional[0])
        return Const(None)

    def on_Function___get__(self, owner, positional, keywords, whole):
        return bound(owner, positional[:1], {})
