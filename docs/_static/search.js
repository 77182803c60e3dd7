/* How the search ranks what it finds. Sphinx calls Scorer.score once for each result: the larger, the higher it stands. */
var distdlQuery = (new URLSearchParams(window.location.search).get("q") || "").trim().toLowerCase();
var distdlTrouble = /hang|stuck|deadlock|freez|wait|slow|memory|oom|differ|wrong|error|fail|crash|die|dead|kill|nan|timeout/;
var distdlFolders = { start: 6, guide: 4, tutorials: 3, concepts: 3, "coming-from": 2, developers: -6 };

/* The words of a title, also those of a name such as HaloExchange or halo_exchange. */
var distdlWords = (title) => title.replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase().split(/[^a-z0-9]+/);

var Scorer = {
  score: ([page, title, anchor, description, score, filename, kind]) => {
    if (page === "wrong" && distdlTrouble.test(distdlQuery)) score += 40;
    score += distdlFolders[page.split("/")[0]] || 0;
    const begins = distdlWords(title).some((word) => distdlQuery && word.startsWith(distdlQuery));
    return kind === "object" && !begins ? score - 20 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 0,
};
