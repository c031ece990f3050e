"""Common English words for prompts. No word contains another, so that finding a word in a text is exact."""

_ADJECTIVES = """
absent active amazing ancient angry annual awake awful basic bitter blank boring brave brief bright brisk
broad broken careful cautious cheap clean clever clumsy coarse complex cosmic crazy crisp cruel curious
curly cynical daring deadly delicate dense dizzy dramatic dreary eager early elastic elegant empty endless
equal eternal exact exotic faint fancy fatal feeble fierce final fluffy formal fragile frank fresh frozen
funny gentle genuine giant gifted global gloomy golden grand grateful greedy handy happy harsh hasty hollow
honest hostile humble hungry immense innocent jealous joyful lively local lonely lovely loyal lucky massive
mature mellow mighty minor misty modern modest muddy mutual nasty nervous noble noisy normal obedient
obvious official ordinary painful patient perfect plain pleasant polite popular precious private prompt
proper proud public puzzled quaint quick quiet rapid ready regular remote rigid rough royal rural rusty
sacred salty scarce secret selfish serious severe shallow sharp shiny silent silly simple sincere sleepy
slender smooth sober solid spare steady steep sticky stiff strange strict sturdy subtle sudden superb sweet
swift tender tense thick thirsty tough tragic tropical typical unique upset urgent useful usual vacant vague
valid violent vivid wealthy weird wicked witty wooden worried worthy young zealous
"""

_NOUNS = """
anchor apple apron arrow author autumn badger balloon bamboo banana barrel basket beacon beaver biscuit
blossom boulder bracelet branch breeze bridge broom bucket buffalo bullet butter button cabbage cabin cactus
camera candle canoe canvas canyon captain caravan carpet carrot castle cathedral ceiling cellar cement
chamber chapel cherry chimney church circle citizen clock closet clover coconut collar compass concert
cookie copper corner cottage cotton cousin cradle crayon cricket crown crystal cupboard curtain cushion
daisy dancer desert diamond dinner doctor dolphin donkey dragon drawer dresser drummer eagle earring elbow
elephant engine envelope fabric factory falcon family farmer feather fence festival fiddle finger flame
flour flower flute forest fossil fountain freezer friend garage garden garlic gazelle giraffe glacier glove
goblet gorilla granite grape guitar hammer harbor harvest hatchet helmet herring highway hockey honey hotel
hunter island ivory jacket jaguar jewel jigsaw journal jungle kernel kettle kitchen kitten ladder lantern
laundry lawyer leather lemon leopard letter library lizard lobster locker lumber machine magnet mailbox
mango maple marble market meadow medal melody mirror monkey morning mosque motor mountain muffin museum
mustard napkin needle nephew notebook nurse oasis ocean octopus office olive onion orchard orchid otter
oxygen oyster paddle palace panther parade parrot pasture peacock peanut pebble pelican pencil pepper piano
picnic pigeon pillow pioneer pirate planet plaster platform pocket polygon portrait potato powder prairie
printer prison puddle puppet pyramid quarry queen rabbit radio railway rainbow raven recipe ribbon river
robot rocket saddle sailor salmon sandal satchel saucer scarf school scissors sculptor senator shadow
shepherd shovel silver singer sister skeleton soldier spider spinach spoon squirrel stadium statue student
submarine sugar summer surgeon sweater tailor teacher temple theater thunder ticket tiger timber tomato
tortoise tower tractor treasure trumpet tulip tunnel turkey turtle umbrella uncle valley vampire vanilla
vehicle velvet village violin volcano waiter walnut walrus weasel whale wheel whistle widow window winter
wizard workshop zebra
"""

ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()
