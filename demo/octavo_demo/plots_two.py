# ruff: noqa: E501  (a template reads better on one line)
"""More plots (see plots.py)."""

from __future__ import annotations

from octavo_demo.plots import Plot, bundles

TREASURE = Plot(
    ("a treasure map", "a treasure", "a {chest} full of {treasure}"),
    bundles(
        "chest treasure riddle answer obstacle way",
        """
        chest; old letters from two friends; What has teeth but cannot bite?; a comb; a wide stream; laid a tree trunk across it
        clay pot; seeds of every colour; What goes up and never comes down?; your age; a thick hedge of thorns; crept under it on their bellies
        iron box; silver whistles; What can you catch but never throw?; a cold; a deep ravine; swung across on a rope
        wooden trunk; costumes and masks; What gets wetter the more it dries?; a towel; a gate without a handle; found a loose board beside it
        leather bag; smooth shining stones; What runs but has no legs?; water; a dark tunnel; held hands and counted their steps
        glass jar; notes for forgotten songs; What is full of holes but still holds water?; a sponge; a steep cliff; cut steps into the soft stone
        """,
    ),
    (
        '[Between the pages of an old book|Behind a loose brick|In an empty bottle by the river], {hero} found a map. [A red cross was drawn on it.|In one corner somebody had written: "For the one who dares."]',
        '{He} showed it to {friend}. "[A treasure|That must be a treasure]!" [whispered|cried] {friend}. "[When do we leave?|Let us go at once!]" They packed [bread, cheese and a rope|a lamp and six apples] and set off [at dawn|the same day].',
        'The map led them through {place}. [Soon|After an hour] they came to {obstacle}. ["Now what?" asked {hero}.|"This is the end," said {hero}.] But {friend} had an idea. They {way}, [and it worked|and nobody got hurt].',
        '[Behind it|A little further on] sat [an old toad|a stone lion|a raven] and blocked the path. "{riddle}" it asked. {Hero} thought and thought. Then {he} [smiled|clapped {his} hands]. "{Answer}!" "That is right," it said and let them pass.',
        "?They were [tired and hungry|covered in dust] by now. They shared the last of their food and [told each other what they would do with the gold|rested for a while].",
        "At the red cross they dug [until their hands hurt|with sticks and stones]. Then there was a [clank|dull sound], and a {chest} came to light. [Slowly they opened it.|{Hero} held {his} breath.]",
        "There was no gold in it. It was full of {treasure}. [At first they were disappointed.|They looked at each other.] But then {friend} began to laugh, and {hero} laughed too, because [it was more fun than gold|nobody could have spent it anyway|it was more beautiful than gold].",
        '[They took home only one piece and buried the rest for the next finder.|They shared it with all the children of the village.] "The best part," said {hero}, "was [the way there|finding it with you]."',
    ),
)

QUARREL = Plot(
    ("a quarrel", "two friends who quarrel", "saying sorry"),
    bundles(
        "matter loss sorry",
        """
        a swing; Nobody swung on it any more; a string of chestnuts
        the last piece of cake; The cake went dry on the plate; half of {his} own supper
        a boat; The boat lay on the shore and filled with rain; a flag that {he} had sewn
        who was the faster runner; The meadow was empty; a drawing of the two of them
        a song; It was very quiet in the evenings; a new verse
        a tree house; The tree house stood empty; a sign with both their names
        a sledge; The snow lay there without a single track; a pair of warm mittens
        """,
    ),
    (
        '{Hero} and {friend} were best friends and did everything together. [But one {daytime} they quarrelled.|Until they quarrelled.] It was about {matter}. "[You always want everything|You started it|That is not fair]!" shouted {hero}. "[And you never listen|I will not play with you any more]!" shouted {friend}.',
        "[They turned their backs on each other and went home.|{friend} slammed the door, and {hero} kicked a stone.] {loss}.",
        "[On the first day {hero} was angry. On the second day {he} was bored. On the third day {he} was sad.|{Hero} tried to play alone, but it was no fun.|{Hero} ate alone, walked alone and laughed at nothing.]",
        '"What is the matter?" asked [{his} grandmother|the old owl|the shepherd]. {Hero} told the whole story. "[And what is worth more, being right or having a friend|Who has to take the first step]?" [{Hero} thought about that for a long time.|{Hero} said nothing, but {his} ears turned red.]',
        "?That night {he} could not sleep. [The moon looked in at the window as if it was waiting.|{He} turned to one side and then to the other.]",
        "[The next morning|Early the next day] {he} took {sorry} and walked to {friend}'s house. Halfway there, {he} saw somebody coming. It was {friend}! {FHe} was carrying something too.",
        '"I am sorry," they said at the same time, and then they had to laugh. ["It was silly," said {hero}. "Very silly," said {friend}.|"I missed you," said {friend}. "I missed you more," said {hero}.]',
        "[Since then they have quarrelled again now and then, but never for longer than an hour.|They shared what they had brought and forgot who had started it.|And as for {matter}, they took turns.]",
    ),
)

FOG = Plot(
    ("losing the way in {mist}", "getting lost", "finding the way home"),
    bundles(
        "mist guide sign errand",
        """
        the fog; an owl with yellow eyes; moss grows on the shady side of the trees; to pick blueberries
        the snow; a white hare; smoke always means a warm stove; to bring wood to {his} aunt
        the forest; a firefly; water always flows down to the village; to look for mushrooms
        the dark; a friendly bat; the brightest star stands above the mill; to visit {friend}
        the tall corn; a field mouse; the wind comes from the sea in the evening; to fly a kite
        the fog; a stray dog; a good nose is better than good eyes; to fetch milk from the farm
        """,
    ),
    (
        '[One {daytime}|In {season}] {hero} set out {errand}. ["Be back before dark," said {his} mother.|"I know the way," {he} said.] {He} [hummed|skipped] along and did not notice how time went by.',
        "[Suddenly|When {he} looked up], {mist} was all around {him}. [{He} could not see the path any more.|Everything looked the same.] {He} went left, then right, then left again, and came to the same [stone|tree stump] three times.",
        '"[Hello|Is anybody there]?" called {hero}. Nobody answered. [{He} sat down and felt very small.|{His} stomach growled.|{He} was close to tears.]',
        'Then {he} heard a [rustling|voice]. It was {guide}. "You are lost," it said. "Yes," said {hero}. "[I have been walking in circles|I do not know where home is]." "[Then you should stop running and start looking|Do not be afraid]," it said. "Remember: {sign}."',
        "{Hero} [wiped {his} eyes|stood up] and [looked carefully|paid attention]. It was true! Step by step, {he} [found the right direction|went on], and {the_guide} [kept {him} company|went ahead].",
        '?On the way they talked about [home|warm soup|the stars], and the way seemed shorter. ["Are you never afraid?" asked {hero}. "Only when I am alone," was the answer.|]',
        '[At last {he} saw a light.|Then {he} heard a bell.] It was home! {friend} stood at the door with a lantern. "[There you are|We were so worried]!" {fhe} cried. {Hero} turned around to say thank you, but {the_guide} was already gone.',
        '[Now {hero} knows the way in any weather.|Every evening {he} puts out a bowl of milk, just in case.|"Who brought you home?" they asked. {Hero} only smiled.]',
    ),
)

BAKING = Plot(
    ("baking {bake}", "{bake}", "a chain of favours"),
    bundles(
        "bake first second third",
        """
        a birthday cake; the miller has flour but needs a new sieve; the hen has an egg but needs straw; the cow has milk but wants fresh clover
        pancakes; the farmer has eggs but lost his hat; the shepherd has butter but his flute is broken; the bees have honey but want flowers
        bread; the neighbour has yeast but the roof leaks; the miller has flour but the cat has run away; the spring has water but a stone blocks it
        an apple pie; the gardener has apples but no ladder; the grocer has sugar but no change; the dairy has butter but no basket
        biscuits; the squirrel has nuts but cannot open them; the goat has milk but itches terribly; the pedlar has cinnamon but sore feet
        """,
    ),
    (
        '{Hero} wanted to bake {bake} [for {friend}|for the village party|because it was raining]. But the cupboard was [empty|as empty as a drum]. "[Then I will go and ask|That will not stop me]," said {hero}.',
        '{He} soon learned how the world works: {first}. "[I can help with that|Leave it to me]," said {hero}, and {he} worked until it was done. [That was the first part.|In return {he} was given what {he} needed.]',
        "Then {he} went on, and it was the same again: {second}. {Hero} [sighed|laughed] and [rolled up {his} sleeves|got to work]. [It took all {daytime}.|{friend} lent a hand.]",
        'One thing was still missing. And sure enough: {third}. [By now {hero} knew what to do.|"Of course," said {hero}.] [One good turn after another, the basket was filled.|Before the sun went down, the basket was full.]',
        '?"You are covered in dust and straw," said {friend}. "[That is the secret of the recipe|Help me carry the basket]," said {hero}.',
        "At home {he} mixed and stirred, and soon [a wonderful smell came from the oven|the whole street smelled of it]. [One after the other they all came to the door|There was a knock, and another, and another]: everybody who had helped, and whom {he} had helped.",
        'There was not much for each of them, but [everybody got a piece|it tasted better than ever]. "What is in it?" asked {friend} with a full mouth. "[A little of everybody|Half of the village]," said {hero}.',
        "[And that is why nobody bakes alone in {place}.|They sat together until the stars came out.|The next day {hero} found flour, eggs and sugar at the door.]",
    ),
)

MYSTERY = Plot(
    ("a mystery", "a thief", "missing {goods}"),
    bundles(
        "goods trace thief why",
        """
        apples; a line of tiny footprints; a hedgehog with five babies; The babies had nothing to eat
        eggs; a trail of yellow feathers; a lonely goose; It had wanted something to hatch
        shoes; scratches on the fence; a young fox; It only wanted to play
        carrots; a hole under the fence; a family of rabbits; Their own field was under water
        spoons; a glitter in the old tree; a magpie; It loved everything that shines
        sausages; paw prints in the mud; an old dog; Nobody had fed it for days
        candles; drops of wax on the stairs; a tiny mouse; It was afraid of the dark
        """,
    ),
    (
        'Something strange was going on in {place}. [Every morning|Night after night] {goods} were missing. ["A thief!" cried the baker.|Everybody blamed everybody else.|The farmer locked all the doors, but it did not help.]',
        '{Hero} was [curious|good at noticing things]. "[I will find out|We need to look more closely]," {he} said to {friend}. They took [a lamp and a notebook|a magnifying glass] and began to search.',
        '[Soon {friend} found {trace}.|Near the gate there was {trace}.] "[A clue|Very interesting]!" [whispered|said] {hero}. They followed it [across the yard|around the barn] until it ended [at a hedge|by the wall].',
        'That night they hid [behind a barrel|under a blanket] and waited. [The clock struck ten, eleven, twelve.|{friend} almost fell asleep.] Then there was a rustling. ["Now!" said {hero} and lifted the lamp.|{Hero} lit the lamp.] There stood {thief}.',
        '"[Please do not be angry|I did not mean any harm]!" it said [in a thin voice|and hung its head]. {why}. [{Hero} and {friend} looked at each other.|{Hero} lowered the lamp.]',
        '?"Why did you not ask?" said {hero}. "I was ashamed," it said.',
        'The next day {hero} told the village everything. First [they were angry|they grumbled], but then [they were quiet|somebody began to smile]. "[Nobody has to steal here|There is enough for all of us]," said [the baker|the farmer].',
        "[From then on a full basket stood by the gate every evening.|They found a better way together.] [And {goods} were never missing again.|And {hero} had one more friend.]",
    ),
)

STAR = Plot(
    ("a fallen star", "a star", "a star that fell from the sky"),
    bundles(
        "helper height",
        """
        an eagle; carried them up on its broad wings
        the wind; blew so hard that they rose higher and higher
        a tall giraffe; stretched its neck as far as it could
        a flock of geese; took the ends of many long threads and flew up
        the oldest tree of the forest; lifted them up on its highest branch
        a cloud; let down a ladder made of rain
        """,
    ),
    (
        "[One night|One clear night] {hero} saw a star fall from the sky. It landed [in the garden|behind the barn|in the pond] with a soft [plop|hiss]. {He} ran outside. There it lay, no bigger than [a plum|a button], and shivered.",
        '"[I leaned too far out|I wanted to see the earth from close up]," said the star. "Now I cannot get back, and [my sisters will miss me|when the morning comes, I will go out]." "[I will help you|Then we have to hurry]," said {hero}.',
        "{He} woke {friend}. First they [threw the star up, but it fell down again|climbed on the roof, but the sky was still too far]. Then they [built a tower of chairs, but it fell over|tied it to a balloon, but the balloon burst]. The star [grew paler|shone more and more weakly].",
        '?"Thank you for trying," whispered the star. "No one has ever been so kind to me down here." ["We do not give up," said {friend}.|{Hero} warmed it between {his} hands.]',
        '"We need somebody who is [taller|stronger] than we are," said {friend}. So they asked {helper}. ["Gladly," was the answer.|At first there was no answer, but then there was a friendly nod.]',
        "They held on tight, and {the_helper} {height}. {Hero} [lifted the star|reached up] and let go. For a moment [everything was still|nothing happened]. Then the star [jumped to its place|began to shine], brighter than before.",
        '"[Goodbye|Thank you], {hero}!" it called. "[Whenever you cannot sleep, look up|I will shine for you]."',
        "[Since then there is a star above {place} that blinks twice every evening.|The next morning they thought that it had been a dream. But there was silver dust on {his} hands.|And if you look closely tonight, you can see it wink.]",
    ),
)

NEWCOMER = Plot(
    ("a new neighbour", "a lonely newcomer", "making a new friend"),
    bundles(
        "newcomer custom bond",
        """
        a bear from the north; slept all day and hummed at night; music
        a parrot from a far country; spoke in words that nobody understood; drawing pictures
        a quiet boy with a big suitcase; never said a word; a game of marbles
        a family of storks; ate with closed eyes; cooking together
        a dragon without a cave; sneezed little flames; lighting the stove in winter
        an old sailor; talked to the weather; stories about the sea
        a girl with a violin; only played when it rained; playing music under the roof
        """,
    ),
    (
        "[One {daytime}|In {season}] somebody new came to {place}: {newcomer}. [Curtains moved, but no door was opened.|Everybody stared, but nobody said hello.] The newcomer {custom}, and that was reason enough to whisper.",
        '"[That is not normal|I would rather stay away]," said [the neighbours|the baker]. {Hero} [was a little afraid too|did not know what to think]. But {he} [also knew how it feels to be alone|remembered {his} own first day].',
        "[So one evening {hero} took a pot of soup and knocked.|So {he} put a small cake on the doorstep, rang the bell and ran away.] [The next day the empty plate stood there, and on it lay a smooth white stone.|The door opened a crack, and two shy eyes looked out.]",
        "It was not easy to talk at first. [They pointed and nodded and laughed about misunderstandings.|{Hero} talked too much, and the newcomer said too little.] But then they discovered something that they both loved: {bond}.",
        '?{friend} was jealous to begin with. "[You are never here any more,|Do you like your new friend more than me?]" {fhe} said. "Come along," answered {hero}. And then they were three.',
        "[When winter came|Some weeks later] there was trouble: [the bridge was broken|the well was frozen|the mill caught fire]. [Nobody knew what to do.|The village needed every hand.] And it was the newcomer who [had the saving idea|worked the longest and the hardest].",
        '"[We were wrong about you|We should have knocked earlier]," said the neighbours, and they were ashamed. [There was a big party.|They brought bread and salt.] ',
        '[Today nobody remembers that there was ever a stranger in {place}.|"Strangers," says {hero}, "are friends who have not had soup with you yet."|And when somebody new comes, {hero} is the first to knock.]',
    ),
)

CLOCK = Plot(
    ("a broken {machine}", "repairing a {machine}", "the day the {machine} stopped"),
    bundles(
        "machine effect fault fix",
        """
        tower clock; nobody knew when to get up or when to eat; a bird had built its nest between the wheels; built the bird a better nest
        windmill; there was no flour and no bread; a kite was caught in the sails; climbed up and cut the kite free
        ferry; nobody could cross the river; a rope had slipped off its wheel; put the rope back in its place
        fountain; the whole village was thirsty; a ball was stuck in the pipe; pulled the ball out with a bent wire
        organ; there was no music at the wedding; a cat was sleeping in the biggest pipe; woke the cat with a saucer of milk
        merry-go-round; the fair was sad and quiet; a spoon had fallen between the gears; fished the spoon out with a magnet
        """,
    ),
    (
        "In the middle of {place} there was a {machine}, [and it was the pride of everybody|older than the oldest house]. [One {daytime}|All of a sudden] it stopped. [There was a crack, and then silence.|It groaned once and stood still.]",
        'That was bad, because {effect}. The mayor sent for [three engineers|a professor from the city]. They [drew plans and shook their heads|hit it with hammers]. "[It cannot be repaired|You need a new one]," they said, "and it will cost a thousand coins."',
        '{Hero} [had listened|stood at the back]. "[May I have a look?|I am small, I can get inside.|Let me try.]" {he} asked. [The men laughed.|"You?" said the mayor.] "[Let {him} try|It cannot get any worse]," said {friend}.',
        'So {hero} crept inside. It was [dark and dusty|cold and smelled of oil]. {He} [looked at one part after another|listened with {his} ear to the wall]. And then {he} saw it: {fault}. [That was all!|"So it is you," {he} said.]',
        '?"Do you need help?" called {friend}. "Hold the lamp a little higher," {he} called back.',
        "{He} thought for a moment. Then {he} {fix}. [There was a click|Something rattled], and [slowly|with a jerk] the {machine} began to move again.",
        '[What a cheer there was!|Hats flew into the air.] "How did you do that?" asked the mayor. "[You looked at your plans, and I looked at the {machine}|I only looked closely]," said {hero}.',
        "[They gave {him} a medal made of chocolate.|Since then {hero} has been allowed to oil it every {weekday}.|The engineers packed their bags and went home very quietly.]",
    ),
)

PLOTS_TWO = (TREASURE, QUARREL, FOG, BAKING, MYSTERY, STAR, NEWCOMER, CLOCK)
