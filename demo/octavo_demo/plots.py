# ruff: noqa: E501  (a template reads better on one line)
"""The plots of the demo stories: what goes wrong, what is tried, what helps, and how it ends.

A plot has bundles of slots that fit together (one bundle is drawn for each story) and its beats in
order; a beat is a template (see templates.py), and one that starts with ? may be left out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plot:
    """One kind of story. `about` names what a request for it would mention."""

    about: tuple[str, ...]
    bundles: tuple[dict[str, str], ...]
    beats: tuple[str, ...]


def bundles(keys: str, rows: str) -> tuple[dict[str, str], ...]:
    """Words by their keys, a bundle for each line of `rows`."""
    names = keys.split()
    return tuple(
        dict(zip(names, (cell.strip() for cell in row.split(";")), strict=True))
        for row in rows.strip().splitlines()
    )


LOST = Plot(
    ("a lost {thing}", "losing a {thing}", "a {thing}"),
    bundles(
        "thing loved where cause",
        """
        key; It opened a tiny box with letters inside.; under a root by the path; a hole in {his} pocket
        ring; It had belonged to {his} grandmother.; in the nest of a magpie; slippery fingers
        red ball; It bounced higher than any other ball.; in the reeds by the pond; a strong wind
        flute; Its tone was as clear as water.; behind the stove in the mill; {his} own hurry
        lantern; It had lit the way home on many nights.; on a branch above the stream; a moment of carelessness
        blue scarf; It kept {him} warm in every winter.; around the neck of the scarecrow; the autumn storm
        silver coin; It brought luck, or so everybody said.; at the bottom of the well; a game that went wrong
        wooden boat; {He} had carved it all by {himself}.; between two stones in the river; the fast water
        story book; {He} knew every page of it by heart.; on the bench behind the church; a long daydream
        golden feather; It shone even in the dark.; in a crack of the old wall; the cheeky wind
        """,
    ),
    (
        "{Hero} owned [a|one] {thing} that {he} loved [very much|more than anything else]. {loved}",
        "[One {daytime}|On a {weather} {daytime}], {hero} reached for the {thing}, and it was gone. "
        '[{His} heart sank.|{He} felt cold all over.|"Oh no!" cried {hero}.|At first {he} could not believe it.]',
        "[{He} looked under the bed, behind the door and even in the soup pot, but found nothing but dust.|{He} searched the whole "
        "house from top to bottom. There was no {thing} anywhere.|{He} ran back along the path and looked behind every bush. Nothing.]",
        '[Then {friend} came by.|{He} went to {friend} for help.|{friend} heard {him} crying and came over.] "[What is wrong|What has '
        'happened|Why are you so sad], {hero}?" asked {friend}. "I have lost my {thing}," [said|whispered|answered] {hero}. "[Let us look for it '
        'together|Four eyes see more than two|Do not give up so soon]," said {friend}.',
        '?"Where did you see it last?" asked {friend}. {hero} thought [hard|for a while]. "[By the river|At the market|Near the old oak]," {he} said, "but I am not sure."',
        "[They followed the path step by step.|They asked [the miller|the baker|a snail] and [an old crow|the frogs|the shepherd], but nobody knew anything.|They walked "
        'slowly and looked at every stone.] [At last|Just before sunset|When they were about to give up], {friend} stopped. "[Look over there|Do you see that|Come here]!"',
        "The {thing} lay {where}. It had been the fault of {cause}. [{Hero} laughed with joy|{Hero} jumped for joy|{Hero} could hardly speak] and hugged {friend}.",
        '[From then on, {he} took better care of {his} {thing}.|"A {thing} is a fine thing," said {hero}, "but a friend who helps me look for it is finer."|That evening {hero} let {friend} '
        "hold the {thing} for as long as {fhe} wanted.|{He} put the {thing} in a safe place and slept very well that night.]",
    ),
)

STORM = Plot(
    ("a storm", "a stormy night", "a guest in a storm"),
    bundles(
        "guest gift",
        """
        an old goat; a bell that rings when danger is near
        a wet little mouse; a nut that never goes bad
        a traveller with a grey beard; a map of all the good paths
        a shivering sparrow; a song that nobody else knew
        a tired pedlar; a needle that mends everything
        a lost lamb; a ball of the softest wool
        a young hedgehog; a basket of the sweetest apples
        a blind badger; a stone that stays warm all winter
        """,
    ),
    (
        "[One {daytime}|One day|In {season}] the sky [turned as black as coal|grew dark long before night], and a [terrible|mighty|wild] storm came over {place}. [The wind howled|Rain beat against the windows|Thunder "
        "rolled over the hills] and [the trees bent low|branches broke|the little house shook].",
        '{Hero} [closed the shutters and lit a fire|sat by the stove and listened|pulled the blanket up to {his} chin]. [{He} was glad to be inside.|"Nobody should be outside tonight," {he} thought.]',
        'Then there was a knock at the door, [so soft that {he} almost missed it|three times, very slowly]. {Hero} [hesitated|was afraid], because {he} [lived alone|did not expect anybody]. But {he} thought: "[Whoever it '
        'is must be cold|I would not like to stand out there myself]." So {he} opened the door. Outside stood {guest}.',
        '"[Please let me in|May I warm myself by your fire|I have lost my way]," said the guest. "[Come in quickly|There is room for two]," said {hero}, and [gave the guest a dry blanket and hot soup|put another log on the fire|made a pot of tea with honey].',
        "?They told each other stories until the thunder was far away. [{Hero} had not laughed so much for a long time.|Outside it rained, but inside it was warm and bright.]",
        "?[In the middle of the night|Late that night] the wind tore a hole in the roof. {Hero} did not know what to do, but the guest did. Together they [nailed a board over it|covered it with straw and stones], and because they were two, it held.",
        '[In the morning|When the sun rose], the storm was over. "[You have been kind to me|You did not ask who I was]," said the guest. "Take this." And {hero} was given {gift}.',
        "[The guest waved and was gone.|They stayed friends from that day on.] [{Hero} kept the gift for the rest of {his} life.|Whenever the wind howls, {hero} leaves a light in the window.|And {hero} "
        "never again was afraid of a knock at the door.]",
    ),
)

CONTEST = Plot(
    ("a {contest}", "winning a {contest}", "a {contest} and a {prize}"),
    bundles(
        "contest prize weakness practice rival trouble",
        """
        race; golden cup; {His} legs were the shortest of all; ran up the hill and down again; the proud hare; had twisted a foot
        singing contest; silver bell; {His} voice trembled when others listened; sang to the frogs by the pond; the vain nightingale; had lost {its} voice
        swimming race; pearl; {He} had always been afraid of deep water; swam a little further; the fast otter; was caught in the water plants
        baking contest; big copper pot; {His} first cake was as hard as a stone; baked one cake after another; the famous baker; had run out of sugar
        kite contest; box of colours; {His} kite was made of old newspaper; flew the kite in the meadow; the rich cousin; had torn the string
        sledge race; woollen cap; {His} sledge was old and slow; pulled the sledge up the slope; the wild fox; had driven into a snowdrift
        chess contest; carved chessboard; {He} had only learned the rules last week; played against the old owl; the clever raven; had forgotten {its} glasses
        """,
    ),
    (
        "[Every year|Each {season}] there was a great {contest} in {place}, and the prize was a {prize}. {Hero} [wanted to take part|dreamed of winning], but there was a problem: {weakness}.",
        '["You?" laughed {rival}. "You will never win."|{Rival} only laughed at {him}.|Everybody believed that {rival} would win.] {Hero} [said nothing|swallowed hard|went red], but {he} [did not give up|made a plan].',
        '[Every morning|Day after day], {he} {practice}. {friend} [helped {him}|came along and cheered|counted and clapped]. "[A little better than yesterday is enough|Slowly, but without stopping]," said {friend}.',
        "?Sometimes {hero} was so tired that {he} wanted to stop. But then {he} thought of [the {prize}|{friend}] and tried once more.",
        'At last the great day came. [The whole village was there.|Flags waved and a drum was beaten.] {Hero}\'s heart [beat fast|pounded]. ["Now!" somebody shouted, and it began.|A bell rang, and it began.]',
        '[In the middle of it|Halfway through], {hero} saw that {rival} {trouble}. [Nobody else stopped.|The others went past without a look.] {Hero} [thought for a moment|sighed]. Then {he} went back to help. "Why do you do that?" asked {rival}. "[Because you need help|Because I know how it feels]," said {hero}.',
        '[So {hero} came in last|{Hero} did not win], and yet [the people clapped louder for {him} than for anyone else|everybody cheered]. "[The {prize} goes to the one with the best heart|Today kindness has won]," said the judge, [and gave {him} the {prize}|and {hero} was given the {prize}].',
        '[{Hero} shared the prize with {friend}.|And {rival} was the first to shake {his} hand.|Since that day {hero} and {rival} have practised together.] [It was the best day of the year.|"Next year we will do it again," {he} said.]',
    ),
)

BIRTHDAY = Plot(
    ("a birthday", "a birthday surprise", "a forgotten birthday"),
    bundles(
        "cake present",
        """
        chocolate cake; a drum
        cherry cake; a warm red coat
        honey cake with nuts; a telescope
        cake with strawberries; a kite with a long tail
        carrot cake; a pair of new boots
        lemon cake; a book with empty pages
        apple cake; a tiny music box
        pancake tower; a lantern with coloured glass
        """,
    ),
    (
        "[It was {hero}'s birthday|Today was {hero}'s birthday], and {he} woke up [before the sun|early] and [listened|looked around]. But [nobody sang|there was no cake|the house was empty].",
        '["They must be busy," {he} thought.|{He} put on {his} best clothes and went outside.] On the way {he} met {friend}. "Good morning!" said {hero}. "Do you know what day it is?" "[It is {weekday}|A {weather} day|The day before tomorrow]," said {friend}, and hurried away.',
        '[Then {hero} met the baker.|At the corner stood the baker.] "Do you know what day it is?" {he} asked. "[No time, no time|Ask me tomorrow]!" said the baker and [hid something behind {bhis} back|shut the door].',
        '[{Hero} walked to the river and threw stones into the water.|{Hero} sat down under a tree.] "[They have all forgotten me|Nobody thinks of me]," {he} said, and a tear ran down {his} nose.',
        '?A frog looked out of the water. "Sometimes people are quiet because they have a secret," it said, and dived down again. {Hero} did not understand.',
        'When it grew dark, {he} went home. [The windows were black.|There was no light.] {He} opened the door, and [all at once|suddenly] a hundred candles were lit. "Surprise!" [cried|shouted] {friend}, and the baker, and [all the neighbours|the whole village].',
        'In the middle of the table stood a {cake}, and beside it lay {present}. "We could not say anything," [laughed|explained] {friend}. "[You would have guessed it|It was so hard to keep quiet]!"',
        "{Hero} [laughed and cried at the same time|did not know what to say]. [They danced until midnight.|They ate the {cake} to the last crumb.] [It was the best birthday of all.|And {he} never again believed that {he} was forgotten.]",
    ),
)

FEAR = Plot(
    ("being afraid of {fear}", "someone who is afraid of {fear}", "courage"),
    bundles(
        "fear reason task deed",
        """
        the dark; {He} thought that monsters lived in it; fetch the doctor at midnight; walked through the dark with nothing but a small candle
        deep water; {He} had once fallen into the lake; save a kitten from the river; jumped into the water and swam as well as {he} could
        heights; Even a chair was too high for {him}; bring down a baby bird from the tower; climbed up step by step and did not look down
        thunder; {He} always hid under the bed; close the stable door in the middle of a storm; ran through the thunder to the stable
        the forest; {He} believed that it swallowed people; bring medicine to the other side of the forest; followed the narrow path between the trees
        strangers; {He} never knew what to say; ask a stranger for help; walked up to the stranger and spoke first
        the old bridge; It creaked with every step; carry a letter across the old bridge; set one foot before the other until {he} was across
        """,
    ),
    (
        "{Hero} was [brave in most things|not afraid of much], but {he} was afraid of {fear}. {reason}. [The others made fun of {him}.|{He} told nobody about it.|{He} was ashamed of it.]",
        '"[Everybody is afraid of something|I am afraid of spiders|There is nothing wrong with being afraid]," said {friend}. "[You only have to be a little braver than your fear|One day you will see]." {Hero} [shook {his} head|did not believe it].',
        '[Then, one {daytime},|But one {daytime}] something happened. Somebody had to {task}, and [there was nobody else|{friend} had hurt {fhis} leg]. "[You must go|Only you can do it], {hero}," said {friend}.',
        '{Hero}\'s [knees|hands] shook. {He} [closed {his} eyes|took a deep breath] and counted to [three|ten]. ["I am afraid," {he} said, "but I will do it anyway."|Then {he} thought of how much {he} was needed.]',
        "So {he} {deed}. [It was not as bad as {he} had thought.|It was terrible at first, and then a little less terrible.|{He} sang a song to keep up {his} courage.]",
        "?Once {he} [wanted to turn back|stumbled and nearly cried]. But {he} remembered the words of {friend} and went on.",
        'When it was done, [everybody clapped|{friend} hugged {him}|{he} sat down and laughed]. "Were you not afraid?" {friend} asked. "Yes," said {hero}, "[but the fear was smaller than I was|I took the fear with me]."',
        "[Since then {he} has not been so afraid of {fear}.|{Hero} is still a little afraid of {fear}, but that does not stop {him} any more.|And nobody ever made fun of {him} again.]",
    ),
)

SEED = Plot(
    ("a {plant}", "a seed", "growing a {plant}", "patience"),
    bundles(
        "plant danger rescue wonder",
        """
        sunflower; the wind almost broke it; tied it to a stick; it was taller than the house
        pumpkin; slugs came to eat it; put a ring of sand around it; six mice could live in it
        apple tree; a goat wanted to eat the leaves; built a little fence; it bore apples as sweet as honey
        rose; frost came in the night; covered it with a blanket; its smell filled the whole valley
        beanstalk; it did not know where to climb; gave it a long rope; it reached up to the clouds
        cherry tree; the ground was as dry as dust; carried water from the well; the birds came from far away to see it
        """,
    ),
    (
        '[An old woman|A travelling merchant|A blackbird] gave {hero} a seed that was no bigger than [a crumb|a ladybird]. "[Plant it and be patient|Good things take time]," {hero} was told.',
        "{Hero} [dug a hole|made a little bed of earth] in {place} and planted the seed. {He} watered it and [waited|sat down to watch]. Nothing happened. The next day {he} looked again. Still nothing.",
        '"[Perhaps it is not a seed but a stone|It is asleep]," said {friend}. [{Hero} wanted to dig it up|{Hero} was angry and kicked the bucket]. "No, wait," said {friend}. "[You do not pull at a story either|Under the earth it is working]."',
        'So {hero} [waited and watered|sang to it every evening|carried water every morning]. [A week went by|The moon grew round and thin again]. Then, one {daytime}, a tiny green tip stood there. "It lives!" [shouted|cried] {hero}.',
        "[But|As it grew,] there was danger: {danger}. {Hero} [did not hesitate|thought quickly] and {rescue}. [{friend} helped {him}.|It took the whole day.]",
        "?In the hot weeks {he} gave it water, and in the cold nights {he} talked to it. Nobody had ever been so patient.",
        "[In {season}|When the time came] it was a [splendid|wonderful] {plant}, and {wonder}. [Everybody came to look.|People stopped and stared.]",
        '"How did you do that?" they asked. "[I waited|Every day a little]," said {hero}. [And {he} gave each of them a seed.|{friend} only smiled.|The next year there was a whole garden of them.]',
    ),
)

PLOTS_ONE = (LOST, STORM, CONTEST, BIRTHDAY, FEAR, SEED)
